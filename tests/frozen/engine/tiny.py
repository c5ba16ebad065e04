"""Models of the size that a laptop runs at once, with the structure of large ones."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from attnplug.errors import ModelConfigError

SIZES = {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    # Random weights as small as those that are trained from would let each token say the next.
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}


def shrink(config: PreTrainedConfig, window: int = 32) -> PreTrainedConfig:
    """A copy with few and narrow layers of every kind there is, and windows of `window` keys."""
    small = copy.deepcopy(config)
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"])
    layers = max(2, *(kinds.index(kind) + 1 for kind in kinds))
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    groups = min(config.num_attention_heads // kv_heads, 4)
    sizes = {
        **SIZES,
        "num_hidden_layers": layers,
        "num_attention_heads": 2 * groups,
        "num_key_value_heads": 2,
    }
    if getattr(config, "layer_types", None):
        sizes["layer_types"] = kinds[:layers]
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(config, name, None):
            sizes[name] = window
    for name, value in sizes.items():
        if hasattr(small, name):
            setattr(small, name, value)
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    return small


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where a model runs, and in what: `--device` and `--dtype`."""
    parser.add_argument(
        "--device", type=usable_device, default="cpu", help="cpu, cuda, cuda:1 (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="of weights and KV; tokens are compared, but need be equal in float32 only (default: %(default)s)",
    )


def usable_device(text: str) -> torch.device:
    """An argument that names a device which torch can use here."""
    try:
        device = torch.device(text)
        torch.zeros(1, device=device).item()
        return device
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(f"{text!r} is no device torch can use here: {first_line}") from error


def load(
    path: str | Path, scale: str = "full", device: torch.device | str = "cpu", dtype: str = "float32"
) -> PreTrainedModel:
    """The model of a config.json with random weights, the same each time; `scale` "tiny" shrinks it.

    Raises:
        ModelConfigError: no such file, or no configuration of a causal language model.
    """
    if not Path(path).exists():
        raise ModelConfigError(
            f"{path}: no such file; give the path of a config.json (nothing is downloaded)"
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        torch.manual_seed(0)
        small = shrink(config) if scale == "tiny" else config
        with torch.device(device):  # drawn there, where large models are drawn much faster
            return AutoModelForCausalLM.from_config(small, dtype=getattr(torch, dtype)).eval()
    except (OSError, ValueError, AttributeError) as error:
        raise ModelConfigError(
            f"{path}: not a causal language model that transformers can build: {error}"
        ) from error
