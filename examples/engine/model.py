"""A transformers model with its attention on attnplug's paged runtime; all else is the model's own."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fixed_rows import fix_rows
from ranks import Ranks
from states import number_of_states, page_size, page_states, weights_of
from transformers import AttentionInterface, PreTrainedModel

import attnplug
from attnplug.core import BuilderConfig, LayerSpec, LayerTensors
from attnplug.errors import ModelConfigError
from attnplug.integrations.transformers import read_config
from attnplug.runtime import AttentionRuntime, SharingPrices, check_same_plan, serving_states

NAME = "attnplug_engine"  # without a mask entry transformers makes no mask: the runtime knows who sees what


class KeptLatents(torch.nn.Linear):
    """Replaces `kv_b_proj` of a layer with latent attention, because the runtime absorbs or expands the latents.

    It keeps its input `[1, ..., T, kv_lora_rank]` and returns zeros, which take no memory and no time.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """Zeros of the shape of the product."""
        self.kept = latents
        return latents.new_zeros(()).expand(*latents.shape[:-1], self.weight.shape[0])


def attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **call: Any
) -> tuple[torch.Tensor, None]:
    """Attend packed tokens: `query [1, H, T, D]`, `key`, `value [1, Hkv, T, D]` to `[1, T, H, D]`."""
    spec = module.paged_spec
    # The spec has the whole scale. A model that multiplies its queries has applied a part of it.
    if call["scaling"] not in (None, spec.scale):
        query = query * (call["scaling"] / spec.scale)
    if spec.mla is None:
        heads = (query, key, value)
        return module.paged_forward(*(each[0].transpose(0, 1) for each in heads))[None], None
    # All heads share the rotated part of a key, which is its last.
    rotated = key[0, 0, :, spec.mla.qk_nope_head_dim :]
    latents = torch.cat((module.kv_b_proj.kept.reshape(rotated.shape[0], -1), rotated), dim=1)
    return module.paged_forward(query[0].transpose(0, 1), latents[:, None])[None], None


def page_model(
    model: PreTrainedModel,
    num_blocks: int,
    block_size: int | None,
    limits: BuilderConfig,
    ranks: Ranks | None = None,
    planning: Mapping[str, Any] | None = None,
    invariance: Sequence[str] = (),
    prefix_sharing: SharingPrices | bool = True,
    kv_cache_dtype: str = "auto",
) -> AttentionRuntime:
    """Plan the layers of a model, and have it call the runtime given back; ModelConfigError if it cannot.

    `planning` are further arguments of `attnplug.plan`, such as `tuned` or `per_phase`. All layers ask for `invariance`, and
    those that are not attention then compute a fixed number of tokens at a time. Attention keeps pages in `kv_cache_dtype`.
    """
    if not model._can_set_attn_implementation():
        raise ModelConfigError(f"{type(model).__name__} never calls transformers' AttentionInterface")
    read = read_config(model.config)
    # Experts and MLPs see single tokens, so they need nothing of the runtime.
    others = {kind for kind in read.other_layers.values() if kind not in ("moe", "mlp")}
    kinds = {spec.attn_type.value for spec in read.layers.values()} | others
    if kinds != {"decoder"} or read.kv_sharing:
        raise ModelConfigError(f"{read.name} has other layers than decoders with KV of their own: {kinds}")
    modules = {name: model.get_submodule(name) for name, spec in read.layers.items() if spec.state is None}
    ranks = Ranks() if ranks is None else ranks
    asked = {"block_size": block_size, "dtype": model.dtype, "invariance": tuple(invariance)}
    asked["kv_cache_dtype"] = kv_cache_dtype
    layers = {name: read.layers[name].replace(**asked) for name in modules}
    layers = {name: ranks.own_part(spec) for name, spec in layers.items()}
    given = {"num_blocks": num_blocks, "context_parallel": ranks.tokens, **(planning or {})}
    states = {name: spec.replace(dtype=model.dtype) for name, spec in read.layers.items() if spec.state}
    if states:
        drafts = limits.num_speculative_tokens
        size = page_size(layers, functools.partial(attnplug.plan, device=model.device, **given))
        layers |= serving_states(states, drafts=drafts, block_size=size)
        given["num_states"] = number_of_states(limits.max_num_seqs, drafts)
    plan = attnplug.plan(layers, model.device, **given)
    if ranks.watch is not None:
        check_same_plan(plan, dist.group.WORLD)
    tensors = {name: tensors_of(module, layers[name]) for name, module in modules.items()}
    tensors |= weights_of(model, states)
    runtime = AttentionRuntime(
        plan, tensors, config=limits, device=model.device, prefix_sharing=prefix_sharing
    )
    for name, module in modules.items():
        module.paged_forward = functools.partial(runtime.forward, name)
        module.paged_spec = layers[name]
    page_states(model, runtime)
    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
    if invariance:
        fix_rows(model)
    elif model.device.type == "cpu":
        pack_linears(model)
    return runtime


def tensors_of(module: Any, spec: LayerSpec) -> LayerTensors:
    """The layer's tensors that attention needs; of latent attention, its module keeps the latents from now on."""
    if spec.mla is None:
        return LayerTensors(sinks=module.sinks.data.float() if spec.has_sinks else None)
    if not isinstance(module.kv_b_proj, KeptLatents):
        module.kv_b_proj = KeptLatents(module.kv_b_proj)
    return LayerTensors(kv_b_proj=module.kv_b_proj.weight.data)


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
