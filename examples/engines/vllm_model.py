"""vLLM's side of a model for vllm_run.py: weights made in place, and a dense block for gpt-oss's experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


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


def dense_experts(size: int) -> None:
    """Replace gpt-oss's experts by a dense block of an inner size."""
    from vllm.model_executor.models import gpt_oss
    from vllm.model_executor.models.llama import LlamaMLP

    class Dense(LlamaMLP):  # type: ignore[misc]
        """The block of a gpt-oss layer in place of its experts."""

        def __init__(self, vllm_config: Any, layer_idx: int, prefix: str = "") -> None:
            super().__init__(vllm_config.model_config.hf_config.hidden_size, size, "silu", prefix=prefix)

    if hasattr(gpt_oss.TransformerBlock, "mlp_cls"):
        gpt_oss.TransformerBlock.mlp_cls = Dense
    else:  # vLLM up to 0.28 or so
        gpt_oss.MLPBlock = Dense
