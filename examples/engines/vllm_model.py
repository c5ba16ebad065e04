"""A model for vllm_run.py: a configuration in a folder, random weights that make attention matter, dense experts.

vLLM's own dummy weights are so small that a token depends on the one before it alone. Here each part of a layer adds
as much as the others, and a query attends a few keys strongly. So a wrong backend draws other tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

LOAD_FORMAT = "attnplug_random"
SHARPNESS = 4.0
"""The standard deviation of attention's logits."""


def folder(file: str, layers: int | None) -> str:
    """A new folder with the configuration, cut to its first `layers`, without quantization and tied embeddings."""
    config = json.loads(Path(file).read_text())
    config.pop("quantization_config", None)
    # With one matrix for both ends the likeliest token would be the last one again.
    config["tie_word_embeddings"] = False
    if layers:
        config["num_hidden_layers"] = min(layers, config["num_hidden_layers"])
        if config.get("layer_types"):
            config["layer_types"] = config["layer_types"][:layers]
    place = Path(tempfile.mkdtemp())
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def register_weights() -> None:
    """Add `LOAD_FORMAT` to the formats that vLLM can load."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader(LOAD_FORMAT)
    class RandomWeights(DummyModelLoader):  # type: ignore[misc]
        """Dummy weights, of a useful size."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Fill the model's parameters."""
            super().load_weights(model, model_config)
            fill(model)


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Fill the parameters in place: what goes into each part has a standard deviation of 1."""
    gemma = any(type(module).__name__ == "GemmaRMSNorm" for module in model.modules())
    done: set[int] = set()
    draw: dict[torch.device, torch.Generator] = {}
    for module in model.modules():
        norm = "Norm" in type(module).__name__
        # Gemma multiplies embeddings by the root of their size.
        whole = "Embedding" in type(module).__name__ and not gemma
        for name, weight in module.named_parameters(recurse=False):
            if weight.data_ptr() in done or not weight.is_floating_point():
                continue
            done.add(weight.data_ptr())
            device = weight.device
            generator = draw.setdefault(device, torch.Generator(device).manual_seed(seed))
            if norm:
                # Gemma's norms add 1 to their weight.
                weight.fill_(0.0 if "Gemma" in type(module).__name__ else 1.0)
            elif weight.ndim > 1:
                weight.normal_(0.0, 1.0 if whole else weight.shape[-1] ** -0.5, generator=generator)
            elif name == "sinks":
                weight.normal_(0.0, 1.0, generator=generator)
            else:
                weight.zero_()
    for module in model.modules():
        if not hasattr(module, "qkv_proj"):
            continue
        if hasattr(module, "q_norm"):
            own = module.q_norm.weight
            own.fill_(SHARPNESS - 1.0 if "Gemma" in type(module.q_norm).__name__ else SHARPNESS)
        else:
            module.qkv_proj.weight[: module.q_size].mul_(SHARPNESS)


def dense_experts(config: Mapping[str, Any]) -> None:
    """Replace gpt-oss's experts by one dense block as large as those that a token uses.

    Attention is measured here, and not every installation has kernels for experts.

    Raises:
        ValueError: the model is another one.
    """
    if config.get("model_type") != "gpt_oss":
        raise ValueError(f"--dense is for gpt_oss; this model is {config.get('model_type')!r}")
    from vllm.model_executor.models import gpt_oss
    from vllm.model_executor.models.llama import LlamaMLP

    class Dense(LlamaMLP):  # type: ignore[misc]
        """What a layer of gpt-oss has in place of its experts."""

        def __init__(self, vllm_config: Any, layer_idx: int, prefix: str = "") -> None:
            model = vllm_config.model_config.hf_config
            wide = model.intermediate_size * model.num_experts_per_tok
            super().__init__(model.hidden_size, wide, "silu", prefix=prefix)

    if hasattr(gpt_oss.TransformerBlock, "mlp_cls"):
        gpt_oss.TransformerBlock.mlp_cls = Dense
    else:  # vLLM up to 0.28 or so
        gpt_oss.MLPBlock = Dense
