"""A transformers model with its attention on attnplug's paged runtime; all else is the model's own."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

import attnplug
from attnplug.core import BuilderConfig, LayerTensors
from attnplug.errors import ModelConfigError
from attnplug.integrations.transformers import read_config
from attnplug.runtime import AttentionRuntime

NAME = "attnplug_engine"  # without a mask entry transformers makes no mask: the runtime knows who sees what


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **call: Any
) -> tuple[torch.Tensor, None]:
    """Attend packed tokens: `query [1, H, T, D]`, `key`, `value [1, Hkv, T, D]` to `[1, T, H, D]`."""
    # The spec's scale is the whole one, of which a model that multiplies its queries has applied a part.
    if call["scaling"] not in (None, module.paged_scale):
        query = query * (call["scaling"] / module.paged_scale)
    return module.paged_forward(*(heads[0].transpose(0, 1) for heads in (query, key, value)))[None], None


def page_model(
    model: PreTrainedModel, num_blocks: int, block_size: int | None, limits: BuilderConfig
) -> AttentionRuntime:
    """Plan the layers of a model, and have it call the runtime given back; ModelConfigError if it cannot."""
    if not model._can_set_attn_implementation():
        raise ModelConfigError(f"{type(model).__name__} never calls transformers' AttentionInterface")
    read = read_config(model.config)
    kinds = {spec.attn_type.value for spec in read.layers.values()} | {*read.other_layers.values()}
    if kinds != {"decoder"} or read.kv_sharing:
        raise ModelConfigError(f"{read.name} has other layers than decoders with KV of their own: {kinds}")
    modules = {name: model.get_submodule(name) for name in read.layers}
    layers = {n: spec.replace(block_size=block_size, dtype=model.dtype) for n, spec in read.layers.items()}
    plan = attnplug.plan(layers, model.device, num_blocks=num_blocks)
    sinks = {n: LayerTensors(sinks=modules[n].sinks.data.float()) for n, s in layers.items() if s.has_sinks}
    runtime = AttentionRuntime(plan, sinks, config=limits, device=model.device)
    for name, module in modules.items():
        module.paged_forward = functools.partial(runtime.forward, name)
        module.paged_scale = layers[name].scale
    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
    if model.device.type == "cpu":
        pack_linears(model)
    return runtime


def pack_linears(model: PreTrainedModel) -> None:
    """Run projections on a copy of their weights in oneDNN's own layout, which is faster on a CPU."""
    if not torch.backends.mkldnn.is_available():
        return
    linear, pack = torch.ops.mkldnn._linear_pointwise, torch.ops.mkldnn._reorder_linear_weight
    plain = {"attr": "none", "scalars": [], "algorithm": ""}
    for module in model.modules():
        # Other dtypes need more than every CPU has.
        if type(module) is torch.nn.Linear and module.weight.dtype is torch.float32:
            module.forward = functools.partial(linear, W=pack(module.weight.data), B=module.bias, **plain)
