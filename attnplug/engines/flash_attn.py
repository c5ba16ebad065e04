"""Engines that call the functions of flash-attn: attnplug's functions of those names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.engines.engine import Call, Engine
from attnplug.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from attnplug.ops import write_kv_cache


def _refusals(spec: LayerSpec) -> Iterator[str]:
    flags = {
        "latent attention": spec.mla is not None,
        "states": spec.state is not None,
        "sinks": spec.has_sinks,
        "chunks": spec.chunk_size is not None,
        "multimodal spans": spec.mm_prefix,
        "selections of keys": spec.sparse is not None,
        "invariance": bool(spec.invariance),
    }
    yield from (f"its functions have no argument for {name}" for name, is_asked in flags.items() if is_asked)
    if spec.resolved_kv_cache_dtype != spec.dtype:
        yield "its caches have the dtype of the queries"
    if spec.has_pages and spec.head_size_v != spec.head_size:
        yield "its caches have keys and values of one size"


def _asked(spec: LayerSpec) -> Iterator[LayerSpec]:
    """The layers that the functions read from their arguments, which do not name encoders and cross attention."""
    if spec.has_pages:
        spec = spec.replace(attn_type="decoder", causal=spec.causal)
        yield spec
        if not spec.causal:
            # A batch may be causal, and so is a call of one query for each request.
            yield spec.replace(causal=True, window=(spec.window[0], -1))
    elif spec.causal or spec.is_windowed or spec.has_alibi:
        yield spec.replace(attn_type="decoder", causal=spec.causal)
    else:
        yield spec.replace(attn_type="encoder_decoder", causal=False)


def _attend(call: Call) -> None:
    spec, common, tokens = call.spec, call.common, call.common.num_actual_tokens
    named: dict[str, Any] = {
        "softmax_scale": spec.scale,
        "causal": spec.causal_in(common.causal),
        "window_size": spec.window,
        "softcap": spec.logits_soft_cap or 0.0,
        "alibi_slopes": call.tensors.alibi_slopes,
    }
    starts = common.query_start_loc if common.key_start_loc is None else common.key_start_loc
    if spec.has_pages:
        starts = torch.nn.functional.pad(common.seq_lens.cumsum(0), (1, 0)).int()
    new, keys = call.new_lens(), starts.diff().tolist()
    is_even = len({*new}) == 1 and new[0] > 0
    if not spec.has_pages and is_even and len({*keys}) == 1:
        query, key, value = (
            _cut(call.query, common.query_start_loc),
            _cut(call.key, starts),
            _cut(call.value, starts),
        )
        found: Any = flash_attn_func(query, key, value, return_attn_probs=spec.needs_lse, **named)
    elif spec.has_pages and is_even and spec.attn_type is AttentionType.DECODER and min(keys) >= new[0]:
        query, key, value = (
            _cut(each, common.query_start_loc) for each in (call.query, call.key, call.value)
        )
        found = flash_attn_with_kvcache(
            query,
            *call.pages(),
            key,
            value,
            cache_seqlens=common.seq_lens - new[0],
            block_table=common.block_table_tensor,
            return_softmax_lse=spec.needs_lse,
            **named,
        )
    else:
        total, table = int(starts[-1]), None
        given = call.key[:total], call.value[:total]
        if spec.has_pages:
            # Such engines write the tokens of a step by a kernel of their own.
            given, table, slots = call.pages(), common.block_table_tensor, common.slot_mapping
            write_kv_cache(call.key[: len(slots)], call.value[: len(slots)], *given, slots)
        found = flash_attn_varlen_func(
            call.query[:tokens],
            *given,
            common.query_start_loc,
            starts,
            common.max_query_len,
            common.max_seq_len,
            block_table=table,
            return_attn_probs=spec.needs_lse,
            **named,
        )
    output, lse = found[:2] if spec.needs_lse else (found, None)
    call.output[:tokens] = output.reshape(tokens, *call.output.shape[1:])
    if call.lse is not None and lse is not None:
        # [B, H, L] of rows, or [H, T] of packed tokens.
        call.lse[:tokens] = lse.transpose(-1, -2).reshape(tokens, spec.num_heads)


def _cut(packed: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Packed tokens of requests of one length as `[B, L, H, D]`."""
    reqs = len(starts) - 1
    return packed[: int(starts[-1])].view(reqs, -1, *packed.shape[1:])


ENGINE = Engine("flash-attn", _refusals, _asked, _attend)
