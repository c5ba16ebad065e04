"""Prefill and extend: tiles of queries, each over all the keys that it sees."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug.backends.triton.kernels.attend import attend_parts
from attnplug.backends.triton.kernels.formats import SHIFT, STEP, add_sinks, columns_from, head_planes
from attnplug.backends.triton.kernels.ranges import key_range, load_spans
from attnplug.backends.triton.kernels.scan import LN2, LOG2E, finish, in_one_order
from attnplug.backends.triton.kernels.split_places import even_log
from attnplug.backends.triton.kernels.tiles import load_queries, of_head


# Values that differ between steps must not compile another kernel.
@triton.jit(
    do_not_specialize=["first_token", "num_reqs", "left", "right", "chunk", "stride_table", "stride_lse"],
    do_not_specialize_on_alignment=[
        "lse",
        "query_start_loc",
        "seq_lens",
        "block_table",
        "key_start_loc",
        "mm_spans",
    ],
)
def prefill_kernel(
    query,
    k_cache,
    v_cache,
    output,
    lse,
    query_start_loc,
    seq_lens,
    block_table,
    key_start_loc,
    sinks,
    alibi_slopes,
    mm_spans,
    first_token,
    num_reqs,
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
    PAGED: tl.constexpr,
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
    TAIL: tl.constexpr,
    TAIL_V: tl.constexpr,
    ONE: tl.constexpr,
    FIXED: tl.constexpr,
    EVEN: tl.constexpr,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One tile of BLOCK_M rows, `BLOCK_M // GROUP` tokens of one request times the group of one KV head.

    Each of PARTS programs has DV columns of the values: sums of wide heads take more registers than a program has.

    Tile t of the grid belongs to the last request whose first tile, `start // TOKENS + request`, is at or
    before t: so the grid needs no table, only `tokens // TOKENS + requests` programs, some of them idle.
    The heaviest tiles, those late in their requests, come first.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // PARTS
    part = tl.program_id(1) % PARTS

    low = 0
    high = num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        start = tl.load(query_start_loc + middle) - first_token
        if start // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    request = low
    first = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - first
    offset = (tile - (first - first_token) // TOKENS - request) * TOKENS
    if offset >= query_len:
        return
    seq_len = tl.load(seq_lens + request)
    tokens = tl.minimum(query_len - offset, TOKENS)
    rows = tl.arange(0, BLOCK_M)
    num_rows = tokens * GROUP
    first_pos = seq_len - query_len + offset
    last_pos = first_pos + tokens - 1
    positions = first_pos + tl.minimum(rows, num_rows - 1) // GROUP

    first_key = 0
    key_shift = 0
    if not PAGED:
        keys_start = tl.load(key_start_loc + request)
        keys_end = tl.load(key_start_loc + request + 1)
        first_key = seq_len - (keys_end - keys_start)
        key_shift = keys_start - first_key
    lo, hi = key_range(
        first_pos, last_pos, first_key, seq_len, left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    starts = positions
    stops = positions
    first_stop = 0
    last_start = 0
    if HAS_SPANS:
        first_row = (first + offset).to(tl.int64)
        starts, stops = load_spans(mm_spans, first_row + tl.minimum(rows, num_rows - 1) // GROUP)
        first_start, first_stop = load_spans(mm_spans, first_row)
        last_start, last_stop = load_spans(mm_spans, first_row + tokens - 1)
        lo = tl.maximum(tl.minimum(lo, first_start), first_key)
        hi = tl.minimum(tl.maximum(hi, last_stop), seq_len)
    heads = (kv_head * GROUP + rows % GROUP).to(INDEX)
    scale = of_head(scale, kv_head)
    value_scale = of_head(value_scale, kv_head)
    q, q_tail, scale = load_queries(
        query,
        rows,
        num_rows,
        first + offset,
        heads,
        stride_qt,
        stride_qh,
        GROUP,
        D,
        BLOCK_D,
        TAIL,
        scale,
        COMPUTE,
        FIXED and k_cache.dtype.element_ty.primitive_bitwidth == 8,
        FORMAT,
    )
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes + heads)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS and FORMAT is None:
        top = tl.load(sinks + heads) * LOG2E
        total += 1.0
    if FORMAT is None:
        k_head = k_cache + kv_head.to(tl.int64) * stride_kh
        v_head = v_cache + kv_head.to(tl.int64) * stride_vh
        if PARTS > 1:
            v_head += part * DV
    else:
        k_head = head_planes(k_cache, kv_head, stride_kh, FORMAT)
        v_head = head_planes(v_cache, kv_head, stride_vh, FORMAT)
        if PARTS > 1:
            v_head = columns_from(v_head, part * DV, FORMAT)
    table_row = block_table + request.to(tl.int64) * stride_table
    acc, more, top, total = attend_parts(
        q, q_tail, scale, top, total, positions, slopes, starts, stops, first_pos, last_pos, first_stop, last_start,
        lo, hi, k_head, v_head, table_row, key_shift, None, even_log(seq_len, query_len, EVEN),
        stride_kb, stride_kt, stride_vb, stride_vt, cap, left, right, chunk,
        PAGED, BLOCK_SIZE, BLOCK_N, D, DV, BLOCK_D, BLOCK_DV, TAIL, TAIL_V,
        HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SPANS, HAS_CAP, HAS_ALIBI, ALIKE, False, False, SUMS, ONE, FIXED, FORMAT,
    )  # fmt: skip
    if HAS_SINKS and FORMAT is not None:
        acc, more, top, total = add_sinks(acc, more, top, total, tl.load(sinks + heads) * LOG2E)
    if FIXED:
        total = in_one_order(total)
    out, out_lse = finish(acc, top, total)
    places = (first + offset + rows // GROUP).to(tl.int64)
    inside = rows < num_rows
    out_rows = output + (places * stride_ot + heads * stride_oh)[:, None]
    PACKED: tl.constexpr = FORMAT[SHIFT] if FORMAT is not None else 0
    if PARTS > 1:
        # Low halves of rotated bytes are the first half of a row, and parts have bytes side by side.
        out_rows += part * (DV // 2 if PACKED > 1 else DV)
    if PACKED:
        tail, _ = finish(more, top, total)
        _store_part(out_rows, out * value_scale, inside, DV // 2, BLOCK_DV, FORMAT[STEP])
        _store_part(out_rows + PACKED, tail * value_scale, inside, DV // 2, BLOCK_DV, FORMAT[STEP])
    else:
        _store_part(out_rows, out * value_scale, inside, DV, BLOCK_DV, 1)
        if TAIL_V:
            tail, _ = finish(more, top, total)
            _store_part(out_rows + BLOCK_DV, tail * value_scale, inside, DV - BLOCK_DV, TAIL_V, 1)
    if HAS_LSE:
        tl.store(lse + places * stride_lse + heads, out_lse * LN2, mask=inside & (part == 0))


@triton.jit
def _store_part(places, out, inside, SIZE: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """Columns of the outputs, STEP elements from each to the next: as many of WIDTH as there are up to SIZE."""
    dims = tl.arange(0, WIDTH)[None, :]
    at = dims * STEP if STEP > 1 else dims
    tl.store(places + at, out.to(places.dtype.element_ty), mask=inside[:, None] & (dims < SIZE))
