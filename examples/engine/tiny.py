"""Models of the size that a laptop runs at once, with the structure of large ones."""

from __future__ import annotations

import argparse
import copy
import json
import os
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from attnplug.errors import ModelConfigError

SIZES = {
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    # Random weights as small as those that are trained from would let each token say the next.
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
LATENT_SIZES = {
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 40,
    "head_dim": 16,  # the part with positions, for the model's own rotary embedding
    "v_head_dim": 20,
}


def shrink(config: PreTrainedConfig, window: int = 32, vocab_size: int = 512) -> PreTrainedConfig:
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
        "vocab_size": vocab_size,
    }
    if getattr(config, "layer_types", None):
        sizes["layer_types"] = kinds[:layers]
    if getattr(config, "kv_lora_rank", None):
        # One dense layer, so that the others have experts.
        sizes |= {**LATENT_SIZES, "first_k_dense_replace": 1, "topk_group": 1}
        sizes |= {"n_group": min(getattr(config, "n_group", None) or 1, 2)}
        if config.q_lora_rank is not None:
            sizes["q_lora_rank"] = 40
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(config, name, None):
            sizes[name] = window
    for name, value in sizes.items():
        if hasattr(small, name):
            setattr(small, name, value)
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    return small


def add_options(parser: argparse.ArgumentParser) -> None:
    """Where a model runs, in what, and how: `--device`, `--dtype`, `--kv-cache-dtype` and `--invariance`."""
    parser.add_argument(
        "--invariance",
        type=lambda text: tuple(text.split(",")),
        default=(),
        metavar="WORD[,WORD[,WORD]]",
        help="on what a token's bits do not depend: batch, rows, heads (default: on all)",
    )
    parser.add_argument(
        "--device", type=usable_device, default="cpu", help="cpu, cuda, cuda:1 (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="of weights and KV; tokens are compared, but need be equal in float32 only (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        default="auto",
        metavar="DTYPE",
        help="of the pages: fp8_e4m3, int8_token_head, nvfp4, ...; tokens need not be equal then (default: %(default)s)",
    )


def needs_equal(options: argparse.Namespace) -> bool:
    """Whether tokens must be equal: with fewer bits, a step's other requests decide between tokens that are nearly as likely."""
    return options.dtype == "float32" and options.kv_cache_dtype == "auto"


def usable_device(text: str) -> torch.device:
    """An argument that names a device which torch can use here; "cuda" is the GPU of this process of torchrun."""
    try:
        device = torch.device(text)
        if device.type == "cuda" and device.index is None:
            # Without it, each process would take memory of the first GPU.
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.zeros(1, device=device).item()
        return device
    except (RuntimeError, AssertionError) as error:
        first_line = str(error).splitlines()[0]
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a device that torch can use here: {first_line}"
        ) from error


def load_config(path: str | Path) -> PreTrainedConfig:
    """The configuration in a file, also one whose `model_type` is known by the class in `architectures` alone."""
    data = json.loads(Path(path).read_text()) if Path(path).is_file() else {}
    if data.get("model_type", "llama") not in CONFIG_MAPPING and data.get("architectures"):
        found = getattr(transformers, data["architectures"][0], None)  # Kimi K2 is a DeepSeek V3
        if found is not None:
            return found.config_class.from_dict({**data, "model_type": found.config_class.model_type})
    return AutoConfig.from_pretrained(path, local_files_only=True)


def load(
    path: str | Path,
    scale: str = "full",
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    vocab_size: int = 512,
) -> PreTrainedModel:
    """The model of a config.json with random weights, the same each time.

    `scale` "tiny" shrinks it, also to `vocab_size` tokens: a random model repeats itself more with fewer.

    Raises:
        ModelConfigError: no such file, or no configuration of a causal language model.
    """
    if not Path(path).exists():
        raise ModelConfigError(
            f"{path}: no such file; give the path of a config.json (nothing is downloaded)"
        )
    try:
        config = load_config(path)
        torch.manual_seed(0)
        small = shrink(config, vocab_size=vocab_size) if scale == "tiny" else config
        with torch.device(device):  # drawn there, where large models are drawn much faster
            return AutoModelForCausalLM.from_config(small, dtype=getattr(torch, dtype)).eval()
    except (OSError, ValueError, AttributeError) as error:
        raise ModelConfigError(
            f"{path}: not a causal language model that transformers can build: {error}"
        ) from error
