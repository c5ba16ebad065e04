"""A transformers model whose attention runs on attnplug's paged runtime; the rest is the model's own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

import attnplug
from attnplug.core import BuilderConfig, LayerTensors
from attnplug.core.errors import ModelConfigError
from attnplug.integrations.transformers import read_config
from attnplug.runtime import AttentionRuntime, StepBatch

NAME = "attnplug_engine"
"""What `attn_implementation` is set to. It has no mask entry: which keys are seen is the runtime's business."""


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend the step's packed tokens: `query [1, H, T, D]`, `key`, `value [1, Hkv, T, D]` to `[1, T, H, D]`.

    Windows, soft caps and sinks are in the layer's spec. A model that multiplies its queries itself
    passes what is left of the scale, so that the spec's is divided out.
    """
    if scaling is not None and scaling != module.paged_scale:
        query = query * (scaling / module.paged_scale)
    packed = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return module.paged_forward(*packed)[None], None


class PagedModel:
    """A causal language model over `num_blocks` KV blocks.

    Args:
        model: any decoder that dispatches through transformers' AttentionInterface; it is changed.
        num_blocks: blocks of the KV pool, the null block included.
        block_size: tokens per block.
        config: most requests and tokens in a step.

    Raises:
        ModelConfigError: a class with attention of its own, or layers that keep another state than KV.
        NoBackendError: a layer that no backend serves.
    """

    def __init__(
        self, model: PreTrainedModel, num_blocks: int, block_size: int, config: BuilderConfig
    ) -> None:
        if not model._can_set_attn_implementation():
            raise ModelConfigError(f"{type(model).__name__} does not dispatch through AttentionInterface")
        read = read_config(model.config)
        if read.other_layers or read.kv_sharing:
            found = ", ".join(
                dict.fromkeys([*read.other_layers.values(), *["shared KV"] * bool(read.kv_sharing)])
            )
            raise ModelConfigError(f"{read.name} has {found}: this engine runs layers with their own KV only")
        layers = {name: spec.replace(block_size=block_size) for name, spec in read.layers.items()}
        self.plan = attnplug.plan(layers, model.device, num_blocks=num_blocks)
        modules = {name: model.get_submodule(name) for name in layers}
        tensors = {
            name: LayerTensors(sinks=modules[name].sinks.detach().float())
            for name, spec in layers.items()
            if spec.has_sinks
        }
        self.runtime = AttentionRuntime(self.plan, tensors, config=config, device=model.device)
        for name, module in modules.items():
            module.paged_forward = functools.partial(self.runtime.forward, name)
            module.paged_scale = layers[name].scale
        AttentionInterface.register(NAME, attention)
        model.set_attn_implementation(NAME)
        self.model = model.eval()

    @torch.inference_mode()
    def __call__(
        self, batch: StepBatch, tokens: Sequence[int], positions: Sequence[int], rows: Sequence[int]
    ) -> torch.Tensor:
        """Logits `[len(rows), vocabulary]` of some rows of the batch's packed tokens."""
        self.runtime.begin_step(batch)
        ids, at, kept = (torch.tensor(list_, device=self.model.device) for list_ in (tokens, positions, rows))
        return self.model(
            input_ids=ids[None], position_ids=at[None], logits_to_keep=kept.long(), use_cache=False
        ).logits[0]
