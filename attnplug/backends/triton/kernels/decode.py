"""Decode: few queries over many keys, split over the GPU; the last program to finish merges the parts."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug.backends.triton.kernels.formats import add_sinks, columns, head_planes
from attnplug.backends.triton.kernels.ranges import load_spans
from attnplug.backends.triton.kernels.scan import (
    LN2,
    LOG2E,
    add_parts,
    attend,
    finish,
)
from attnplug.backends.triton.kernels.splits import FIELDS
from attnplug.backends.triton.kernels.tiles import load_queries, of_head


# Values that differ between steps, or between a step and a graph's buffers, must not compile another kernel.
@triton.jit(
    do_not_specialize=["left", "right", "chunk", "max_rows", "stride_table", "stride_lse"],
    do_not_specialize_on_alignment=["lse", "seq_lens", "block_table", "mm_spans"],
)
def decode_kernel(
    query,
    k_cache,
    v_cache,
    output,
    lse,
    items,
    seq_lens,
    block_table,
    sinks,
    alibi_slopes,
    mm_spans,
    partials,
    partial_lses,
    arrived,
    max_rows,
    scale,
    value_scale,
    cap,
    left,
    right,
    chunk,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_table,
    stride_lse,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_LSE: tl.constexpr,
    COMPUTE: tl.constexpr,
    INDEX: tl.constexpr,
    ALIKE: tl.constexpr,
    SUMS: tl.constexpr,
    ONE: tl.constexpr,
    MERGE: tl.constexpr,
    PAIRS: tl.constexpr,
    PTX: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """One item of the plan for one KV head: BLOCK_M rows of queries over some of their request's keys.

    An item that is alone writes the output. Else partial results go to `partials [items, Hkv, max_rows, DV]`
    and their LSE, in base 2, to `partial_lses [items, Hkv, max_rows]`. Those are merged by `merge_kernel` where
    MERGE is "later"; else `arrived [reqs, Hkv, row blocks]` counts the items done, and the last one merges
    them, always in the same order, all rows at once ("tile") or "by row", and counts from 0 again.
    """
    kv_head = tl.program_id(0)
    row_block = tl.program_id(1)
    item = tl.program_id(2)
    fields = items + item * FIELDS
    request = tl.load(fields)
    part = tl.load(fields + 1)
    count = tl.load(fields + 2)
    first = tl.load(fields + 3)
    query_len = tl.load(fields + 4)
    lo = tl.load(fields + 5)
    hi = tl.load(fields + 6)
    if count == 0:
        return
    num_rows = query_len * GROUP
    if row_block * BLOCK_M >= num_rows:
        return
    seq_len = tl.load(seq_lens + request)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    first_pos = seq_len - query_len
    positions = first_pos + tl.minimum(rows, num_rows - 1) // GROUP
    starts = positions
    stops = positions
    first_stop = 0
    last_start = 0
    if HAS_SPANS:
        first_row = first.to(tl.int64)
        starts, stops = load_spans(mm_spans, first_row + tl.minimum(rows, num_rows - 1) // GROUP)
        _, first_stop = load_spans(mm_spans, first_row)
        last_start, _ = load_spans(mm_spans, first_row + query_len - 1)
    heads = (kv_head * GROUP + rows % GROUP).to(INDEX)
    scale = of_head(scale, kv_head)
    value_scale = of_head(value_scale, kv_head)
    q, q_tail, scale = load_queries(
        query,
        rows,
        num_rows,
        first,
        heads,
        stride_qt,
        stride_qh,
        GROUP,
        D,
        BLOCK_D,
        0,
        scale,
        COMPUTE,
        False,
        FORMAT,
    )
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + heads)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS and FORMAT is None:
        if part == 0:
            top = tl.load(sinks + heads) * LOG2E
            total += 1.0
    if FORMAT is None:
        k_head = k_cache + kv_head.to(tl.int64) * stride_kh
        if PAIRS:
            v_cache = v_cache.to(tl.pointer_type(tl.int16), bitcast=True)
        v_head = v_cache + kv_head.to(tl.int64) * stride_vh
    else:
        k_head = head_planes(k_cache, kv_head, stride_kh, FORMAT)
        v_head = head_planes(v_cache, kv_head, stride_vh, FORMAT)
    table_row = block_table + request.to(tl.int64) * stride_table
    acc, top, total = attend(
        q, q_tail, scale, top, total, positions, slopes, starts, stops, first_pos, seq_len - 1, first_stop, last_start,
        lo, hi, k_head, v_head, table_row, 0, None, 0,
        stride_kb, stride_kt, stride_vb, stride_vt, cap, left, right, chunk,
        True, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV,
        HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SPANS, HAS_CAP, HAS_ALIBI, ALIKE, PAIRS, PTX, SUMS, ONE, False, FORMAT,
    )  # fmt: skip
    if HAS_SINKS and FORMAT is not None:
        own_sinks = tl.where(part == 0, tl.load(sinks + heads) * LOG2E, float("-inf"))
        acc, _, top, total = add_sinks(acc, acc, top, total, own_sinks)
    out, out_lse = finish(acc, top, total)

    if FORMAT is None:
        dims = tl.arange(0, BLOCK_DV)
    else:
        dims = columns(BLOCK_DV, DV, FORMAT)
    inside = rows < num_rows
    mask = inside[:, None] & (dims < DV)[None, :]
    if count > 1:
        kv_heads = tl.num_programs(0)
        here = ((item * kv_heads + kv_head) * max_rows).to(tl.int64) + rows
        tl.store(partials + here[:, None] * DV + dims[None, :], out, mask=mask)
        tl.store(partial_lses + here, out_lse, mask=inside)
        if MERGE == "later":
            return
        # All threads must write their partials before the count grows.
        tl.debug_barrier()
        counter = arrived + (request * kv_heads + kv_head) * tl.num_programs(1) + row_block
        if tl.atomic_add(counter, 1, sem="acq_rel") < count - 1:
            return
        tl.store(counter, 0)
        step = (kv_heads * max_rows).to(tl.int64)
        place = ((item - part) * kv_heads + kv_head).to(tl.int64) * max_rows + rows
        if MERGE == "by row":
            for row in range(row_block * BLOCK_M, tl.minimum(num_rows, (row_block + 1) * BLOCK_M)):
                _merge_row(
                    partials, partial_lses, output, lse, item - part, count, kv_head, kv_heads, row, max_rows,
                    first, value_scale, stride_ot, stride_oh, stride_lse, GROUP, DV, BLOCK_DV, HAS_LSE,
                )  # fmt: skip
            return
        out, out_lse = _merge(partials, partial_lses, place, step, count, inside, mask, dims, DV)
    tokens = (first + rows // GROUP).to(tl.int64)
    out_places = output + tokens[:, None] * stride_ot + heads[:, None] * stride_oh + dims[None, :]
    tl.store(out_places, (out * value_scale).to(output.dtype.element_ty), mask=mask)
    if HAS_LSE:
        tl.store(lse + tokens * stride_lse + heads, out_lse * LN2, mask=inside)


@triton.jit
def _merge(
    partials,
    partial_lses,
    place,
    step,
    count,
    inside,
    mask,
    dims,
    DV: tl.constexpr,
):
    """The `count` partial results from `place [BLOCK_M]` on, `step` rows apart, as one; their columns are `dims`."""
    acc = tl.zeros([place.shape[0], dims.shape[0]], tl.float32)
    total = tl.zeros([place.shape[0]], tl.float32)
    top = tl.full([place.shape[0]], float("-inf"), tl.float32)
    for index in tl.range(0, count):
        rows = place + index * step
        found = tl.load(partial_lses + rows, mask=inside, other=float("-inf"), cache_modifier=".cg")
        out = tl.load(
            partials + rows[:, None] * DV + dims[None, :], mask=mask, other=0.0, cache_modifier=".cg"
        )
        new_top = tl.maximum(top, found)
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(found - pivot)
        fade = tl.exp2(top - pivot)
        acc = acc * fade[:, None] + out * weight[:, None]
        total = total * fade + weight
        top = new_top
    return finish(acc, top, total)


@triton.jit
def _merge_row(
    partials,
    partial_lses,
    output,
    lse,
    item,
    count,
    kv_head,
    kv_heads,
    row,
    max_rows,
    first,
    value_scale,
    stride_ot,
    stride_oh,
    stride_lse,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Merge one row of the `count` items from `item` on, many at once, and write it."""
    PARTS: tl.constexpr = 32
    dims = tl.arange(0, BLOCK_DV)
    lanes = tl.arange(0, PARTS)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    total = 0.0
    top = float("-inf")
    for done in tl.range(0, count, PARTS):
        there = done + lanes < count
        rows = ((item + done + lanes) * kv_heads + kv_head).to(tl.int64) * max_rows + row
        found = tl.load(partial_lses + rows, mask=there, other=float("-inf"), cache_modifier=".cg")
        out = tl.load(
            partials + rows[:, None] * DV + dims[None, :],
            mask=there[:, None] & (dims < DV)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc, top, total = add_parts(acc, top, total, out, found)
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    token = (first + row // GROUP).to(tl.int64)
    head = (kv_head * GROUP + row % GROUP).to(tl.int64)
    out_places = output + token * stride_ot + head * stride_oh + dims
    tl.store(out_places, (acc / safe * value_scale).to(output.dtype.element_ty), mask=dims < DV)
    if HAS_LSE:
        row_lse = tl.where(empty, float("-inf"), top + tl.log2(safe))
        tl.store(lse + token * stride_lse + head, row_lse * LN2)


@triton.jit(do_not_specialize=["max_rows", "stride_lse"], do_not_specialize_on_alignment=["lse"])
def merge_kernel(
    partials,
    partial_lses,
    output,
    lse,
    items,
    spans,
    max_rows,
    value_scale,
    stride_ot,
    stride_oh,
    stride_lse,
    GROUP: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Merge one row of one KV head and request; `spans [reqs, 2]` are its first item and how many there are."""
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    item = tl.load(spans + request * 2)
    count = tl.load(spans + request * 2 + 1)
    if count <= 1:
        return
    first = tl.load(items + item * FIELDS + 3)
    query_len = tl.load(items + item * FIELDS + 4)
    if row >= query_len * GROUP:
        return
    _merge_row(
        partials, partial_lses, output, lse, item, count, kv_head, tl.num_programs(1), row, max_rows, first,
        of_head(value_scale, kv_head), stride_ot, stride_oh, stride_lse, GROUP, DV, BLOCK_DV, HAS_LSE,
    )  # fmt: skip
