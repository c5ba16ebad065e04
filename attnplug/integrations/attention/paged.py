"""Attention over the paged cache of transformers' continuous batching, `generate_batch`."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from transformers.generation.continuous_batching import PagedAttentionCache

from attnplug.core.errors import BatchError
from attnplug.core.interface.answers import answer
from attnplug.core.precision import without_autocast
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.integrations.attention.calls import AttentionCall
from attnplug.integrations.attention.layers import LayerState
from attnplug.integrations.attention.paged_cache import LayerCache, layer_cache
from attnplug.integrations.attention.paged_steps import PagedStep
from attnplug.integrations.attention.step_mask import PatternMask, StepMask

_ARGUMENTS = (
    *("cache", "cu_seq_lens_q", "cu_seq_lens_k", "block_table", "read_index", "write_index"),
    # The names of the longest lengths differ by version. Attention functions never read the last two.
    *("max_seqlen_q", "max_seqlen_k", "max_length_q", "max_length_k"),
    *("logits_indices", "logits_processor_args"),
)
_GRAPHS = "pass ContinuousBatchingConfig(use_cuda_graph=False)"


def take_paged(keywords: dict[str, Any]) -> dict[str, Any] | None:
    """The keywords of continuous batching, taken out of `keywords`; None for an ordinary call."""
    if not isinstance(keywords.get("cache"), PagedAttentionCache):
        return None
    return {name: keywords.pop(name, None) for name in _ARGUMENTS}


def attend_paged(
    call: AttentionCall, arguments: dict[str, Any], mask: Any, scaling: float | None, layer: LayerState
) -> torch.Tensor:
    """Attention of the step's packed tokens: `[1, T, H, D]`, with zeros for rows that no request has.

    A layer that keeps all tokens reads their pages. A layer with a window keeps a ring of tokens, which
    transformers gathers in their order.

    Raises:
        BatchError: a mask or a step that is not served.
        NoBackendError: no backend serves the layer.
    """
    query, device = call.query, call.query.device
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        limit = f"cannot be served in {call.layer}: lengths are read on the host in each step"
        raise BatchError("use_cuda_graph", True, limit, _GRAPHS)
    part = layer_cache(arguments["cache"], getattr(call.module, "layer_idx", -1))
    mask_step = _mask_step(call, mask)
    step: PagedStep = _once(
        mask_step, ("step", part.kind), lambda: PagedStep.read(arguments, part.kind, query.shape[2])
    )
    output = query.new_zeros(query.shape[2], query.shape[1], call.value.shape[3])
    if not step.tokens:
        return output[None]
    pages = None if part.window is not None else part.pages()
    spec = _spec(call, mask_step, part, scaling, None if pages is None else pages.block_size)
    binding = layer.binding(spec, device, call.keywords.sinks, int(step.query_lens.max()))
    backend = binding.decision.get_backend_cls()
    rows = (tensor.squeeze(0).transpose(0, 1)[: step.tokens] for tensor in (query, call.key, call.value))
    packed, key, value = (tensor.contiguous() for tensor in rows)
    kind = (backend, binding.decision.spec, binding.decision.options, device)
    if pages is None:
        common = step.gathered
        metadata = _once(mask_step, ("gathered", *kind), lambda: binding.build(common(device)))
        key, value = part.update(call.key, call.value, arguments)
        total = int(step.key_lens.sum())
        key, value, cache = key[:total].contiguous(), value[:total].contiguous(), None
    else:
        if "NHD" not in answer(backend, "supported_kv_cache_layouts"):
            limit = f"cannot be read by {backend.get_name()}, and the pages of transformers have it"
            raise BatchError("layout", "NHD", limit, "choose another backend by attnplug.use(...)")
        needs = backend.get_builder_cls().needs_host_seq_lens
        found = pages
        metadata = _once(
            mask_step, ("paged", part.group, *kind), lambda: binding.build(step.paged(part, found, needs))
        )
        cache = pages.as_one()
    with without_autocast(device):
        binding.impl.forward(binding.layer, packed, key, value, cache, metadata, output[: step.tokens])
    return output[None]


def _mask_step(call: AttentionCall, mask: Any) -> StepMask:
    """The step's mask, whose pattern is that of the layer in its model."""
    if not isinstance(mask, PatternMask):
        limit = f"of {call.layer} was not made by transformers' mask functions, so its window is not known"
        raise BatchError("attention_mask", type(mask).__name__, limit)
    if isinstance(mask.step, str):
        limit = f"cannot be served in {call.layer}: {mask.step}"
        raise BatchError("attention_mask", tuple(mask.shape), limit)
    if not mask.step.pattern.causal or mask.step.pattern.blockwise:
        limit = f"in {call.layer} shows later tokens, which continuous batching has not computed"
        raise BatchError("attention_mask", "not causal", limit, "use generate")
    return mask.step


def _spec(
    call: AttentionCall, step: StepMask, part: LayerCache, scaling: float | None, block_size: int | None
) -> LayerSpec:
    """The requirements of the layer.

    Raises:
        BatchError: the cache has dropped keys that the layer sees, or its heads are others.
    """
    pattern, query = step.pattern, call.query.shape
    if part.window is not None and not (0 <= pattern.window[0] < part.window and pattern.chunk_size is None):
        seen = "all tokens" if pattern.window[0] < 0 else f"{pattern.window[0] + 1} tokens"
        seen = f"chunks of {pattern.chunk_size} tokens" if pattern.chunk_size else seen
        limit = f"is all that the cache keeps for {call.layer}, which sees {seen}"
        raise BatchError("sliding_window", part.window, limit, "correct layer_types in the configuration")
    if call.key.shape[3] != call.value.shape[3]:
        sizes = f"{call.key.shape[3]} and {call.value.shape[3]}"
        limit = f"differ in {call.layer}: transformers' paged cache has one size for keys and values"
        raise BatchError("head_size, head_size_v", sizes, limit)
    return LayerSpec(
        num_heads=query[1],
        num_kv_heads=call.key.shape[1],
        head_size=query[3],
        dtype=call.query.dtype,
        attn_type=AttentionType.DECODER,
        scale=None if scaling is None else float(scaling),
        window=pattern.window,
        chunk_size=pattern.chunk_size,
        logits_soft_cap=call.keywords.softcap,
        has_sinks=call.keywords.sinks is not None,
        direct_kv=block_size is None,
        block_size=block_size,
    )


def _once(step: StepMask, key: Hashable, make: Any) -> Any:
    """`make()`, once for all layers that share the mask of a step."""
    if key not in step.metadata:
        step.metadata[key] = make()
    return step.metadata[key]
