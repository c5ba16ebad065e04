"""A model for vllm_run.py: a configuration in a folder, weights made in place, and a dense block for gpt-oss's experts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

ROPE_THETA = 1e8
"""With this base the slowest parts of a rotary embedding are the same at any distance, as vllm_lookup.py needs."""


def folder(file: str, layers: int | None) -> str:
    """A new folder with the configuration in so many layers; quantization, tied embeddings and rotary base differ.

    Kinds of layers repeat where there are more layers than the model has.
    """
    config = json.loads(Path(file).read_text())
    config.pop("quantization_config", None)
    # With one matrix for both ends the likeliest token would be the last one again.
    config["tie_word_embeddings"] = False
    _set_theta(config)
    if layers:
        config["num_hidden_layers"] = layers
        if kinds := config.get("layer_types"):
            config["layer_types"] = [kinds[number % len(kinds)] for number in range(layers)]
    place = Path(tempfile.mkdtemp())
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def _set_theta(config: dict[str, Any]) -> None:
    for name, value in config.items():
        if isinstance(value, dict):
            _set_theta(value)
        elif name == "rope_theta":
            config[name] = ROPE_THETA


def register_weights(load_format: str, fill: Callable[[torch.nn.Module, Any], None]) -> None:
    """Add `load_format` to the formats that vLLM can load: `fill` gets the model and transformers' configuration."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader(load_format)
    class MadeWeights(DummyModelLoader):  # type: ignore[misc]
        """Dummy weights, then those of `fill`."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            """Fill the model's parameters."""
            super().load_weights(model, model_config)
            fill(model, model_config.hf_text_config)


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
        """The block of a gpt-oss layer in place of its experts."""

        def __init__(self, vllm_config: Any, layer_idx: int, prefix: str = "") -> None:
            model = vllm_config.model_config.hf_config
            wide = model.intermediate_size * model.num_experts_per_tok
            super().__init__(model.hidden_size, wide, "silu", prefix=prefix)

    if hasattr(gpt_oss.TransformerBlock, "mlp_cls"):
        gpt_oss.TransformerBlock.mlp_cls = Dense
    else:  # vLLM up to 0.28 or so
        gpt_oss.MLPBlock = Dense
