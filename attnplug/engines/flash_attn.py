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
    new, query = call.new_lens(), call.query[:tokens]
    ends = common.key_start_loc_cpu if spec.direct_kv else common.seq_lens.cpu().cumsum(0)
    if spec.direct_kv:
        starts = common.query_start_loc if common.key_start_loc is None else common.key_start_loc
    else:
        starts = torch.nn.functional.pad(common.seq_lens.cumsum(0), (1, 0)).int()
    keys = starts.diff().tolist()
    reqs, is_even = len(new), len({*new}) == 1 and new[0] > 0
    lse = None
    if spec.direct_kv and is_even and len({*keys}) == 1:
        rows = (each[: int(starts[-1])].unflatten(0, (reqs, -1)) for each in (call.key, call.value))
        found: Any = flash_attn_func(
            query.unflatten(0, (reqs, -1)), *rows, **named, return_attn_probs=spec.needs_lse
        )
        found = (found[0].flatten(0, 1), _rows(found[1])) if spec.needs_lse else found.flatten(0, 1)
    elif spec.attn_type is AttentionType.DECODER and is_even and min(keys) >= new[0] and call.kv_cache is not None:
        q, k, v = (each[:tokens].unflatten(0, (reqs, -1)) for each in (call.query, call.key, call.value))
        found = flash_attn_with_kvcache(
            q,
            *call.pages(),
            k,
            v,
            cache_seqlens=common.seq_lens - new[0],
            block_table=common.block_table_tensor,
            **named,
            return_softmax_lse=spec.needs_lse,
        )
        found = (found[0].flatten(0, 1), _rows(found[1])) if spec.needs_lse else found.flatten(0, 1)
    else:
        keys_and_values, table = (call.key[: int(starts[-1])], call.value[: int(starts[-1])]), None
        if call.kv_cache is not None:
            keys_and_values, table = call.pages(), common.block_table_tensor
            slots = common.slot_mapping
            write_kv_cache(call.key[: len(slots)], call.value[: len(slots)], *keys_and_values, slots)
        found = flash_attn_varlen_func(
            query,
            *keys_and_values,
            common.query_start_loc,
            starts,
            common.max_query_len,
            common.max_seq_len,
            **named,
            return_attn_probs=spec.needs_lse,
            block_table=table,
        )
        found = (found[0], found[1].transpose(0, 1)) if spec.needs_lse else found
    output, lse = found if spec.needs_lse else (found, None)
    call.output[:tokens] = output
    if call.lse is not None:
        call.lse[:tokens] = lse


def _rows(lse: torch.Tensor) -> torch.Tensor:
    """`[B, H, Lq]` as `[B * Lq, H]`."""
    return lse.transpose(1, 2).flatten(0, 1)


ENGINE = Engine("flash-attn", _refusals, _asked, _attend)
