"""The tiles of prefill on Hopper, and the group of warps that copies their queries, keys and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnplug.backends.triton.kernels.ranges import key_range

UNIT: gl.constexpr = gl.constexpr(16)
"""Rows of keys are counted in so many elements: all strides are multiples of them, and 32 bits hold any row."""


@gluon.jit
def tile_of(
    query_start_loc,
    seq_lens,
    key_start_loc,
    first_token,
    num_reqs,
    request_tiles,
    tile,
    left,
    right,
    chunk,
    PAGED: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_CHUNK: gl.constexpr,
):
    """Tile `tile`: its request, first token, number of rows, first and last position, and the keys that it sees.

    The keys are `lo .. hi - 1`. Key i of the call is in row `i + shift`. Each request has `request_tiles` tiles; if that
    is 0, its first one is `start // TOKENS + request`. Tiles past its queries have no rows.
    """
    TOKENS: gl.constexpr = BLOCK_M // GROUP
    alike = request_tiles > 0
    low = gl.where(alike, tile // gl.maximum(request_tiles, 1), 0)
    high = gl.where(alike, low + 1, num_reqs)
    while high - low > 1:
        middle = (low + high) // 2
        begin = gl.load(query_start_loc + middle) - first_token
        is_later = begin // TOKENS + middle <= tile
        low = gl.where(is_later, middle, low)
        high = gl.where(is_later, high, middle)
    request = low
    first = gl.load(query_start_loc + request)
    query_len = gl.load(query_start_loc + request + 1) - first
    seq_len = gl.load(seq_lens + request)
    first_tile = gl.where(alike, request * request_tiles, (first - first_token) // TOKENS + request)
    offset = (tile - first_tile) * TOKENS
    tokens = gl.minimum(gl.maximum(query_len - offset, 0), TOKENS)
    first_pos = seq_len - query_len + offset
    last_pos = first_pos + tokens - 1
    first_key = 0
    shift = 0
    if not PAGED:
        keys_start = gl.load(key_start_loc + request)
        first_key = seq_len - (gl.load(key_start_loc + request + 1) - keys_start)
        shift = keys_start - first_key
    lo, hi = key_range(
        first_pos, last_pos, first_key, seq_len, left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    return request, first + offset, tokens * GROUP, first_pos, last_pos, lo, hi, shift


@gluon.jit
def _copy(
    target,
    head,
    rows,
    there,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Begin to copy rows of D elements, with zeros behind them and where nothing is there; None: all are there."""
    dims = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    # Rows come last, so that an address is one multiplication and addition.
    places = (head + dims) + rows[:, None]
    if there is not None:
        there = there[:, None]
        if D < BLOCK_D:
            there = there & (dims < D)
        async_copy.async_copy_global_to_shared(target, places, mask=there)
    elif D < BLOCK_D:
        async_copy.async_copy_global_to_shared(target, places, mask=dims < D)
    else:
        async_copy.async_copy_global_to_shared(target, places)


@gluon.jit
def _pages(table_row, begin, lanes, hi, PAGED: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """The page of each key of the tile at `begin`; the null block past the last key."""
    if PAGED:
        # Without a sign, and with what lanes add apart, the compiler knows the places of most pages in the table.
        start = gl.cast(begin, gl.uint32)
        row = table_row + start // BLOCK_SIZE
        more = (start % BLOCK_SIZE + lanes.to(gl.uint32)) // BLOCK_SIZE
        if begin + lanes.shape[0] <= hi:
            pages = gl.load(row + more)
        else:
            pages = gl.load(row + more, mask=begin + lanes < hi, other=0)
        return pages
    else:
        return lanes


@gluon.jit
def _rows(
    pages,
    begin,
    lanes,
    stride_block,
    stride_token,
    PAGED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):
    """The places of a tile's keys in UNIT elements: in all pages, or behind the first key of the tile."""
    if PAGED:
        inside = (gl.cast(begin, gl.uint32) % BLOCK_SIZE + lanes.to(gl.uint32)) % BLOCK_SIZE
        rows = pages * (stride_block // UNIT) + inside.to(gl.int32) * (stride_token // UNIT)
    else:
        rows = lanes * (stride_token // UNIT)
    return rows.to(gl.uint32)


@gluon.jit
def _copy_tile(
    target,
    full,
    empty,
    number,
    head,
    rows,
    begin,
    lanes,
    lo,
    hi,
    shift,
    stride_token,
    PAGED: gl.constexpr,
    WHOLE: gl.constexpr,
    FIXED: gl.constexpr,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Begin to copy tile `number` of keys or values, once its place is empty; all of a WHOLE tile is before `hi`.

    Only with FIXED a tile may begin before `lo`.
    """
    stage = number % STAGES
    mbarrier.wait(empty.index(stage), (number // STAGES & 1) ^ 1)
    if not PAGED:
        head += gl.cast(begin + shift, gl.int64) * stride_token
    places = rows.to(gl.int64) * UNIT
    if FIXED:
        if (begin >= lo) & (begin + lanes.shape[0] <= hi):
            _copy(target.index(stage), head, places, None, D, BLOCK_D, LAYOUT)
        else:
            there = (begin + lanes >= lo) & (begin + lanes < hi)
            _copy(target.index(stage), head, places, there, D, BLOCK_D, LAYOUT)
    elif WHOLE:
        _copy(target.index(stage), head, places, None, D, BLOCK_D, LAYOUT)
    elif begin + lanes.shape[0] <= hi:
        _copy(target.index(stage), head, places, None, D, BLOCK_D, LAYOUT)
    else:
        _copy(target.index(stage), head, places, begin + lanes < hi, D, BLOCK_D, LAYOUT)
    async_copy.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def copy_tiles(
    query,
    k_cache,
    v_cache,
    query_start_loc,
    seq_lens,
    block_table,
    key_start_loc,
    first_token,
    num_reqs,
    num_tiles,
    request_tiles,
    left,
    right,
    chunk,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kt,
    stride_kh,
    stride_vb,
    stride_vt,
    stride_vh,
    stride_table,
    q,
    k,
    v,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    KV_HEADS: gl.constexpr,
    PAGED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_CHUNK: gl.constexpr,
    FIXED: gl.constexpr,
):
    """Copy the queries of each tile, then its keys and values, as soon as both other groups are done with their place."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    HALF: gl.constexpr = BLOCK_M // 2
    lanes = gl.arange(0, BLOCK_N, layout=ROWS)
    half_rows = gl.arange(0, HALF, layout=ROWS)
    works = num_tiles * KV_HEADS
    work = gl.program_id(0)
    streams = 0
    copied = 0
    while work < works:
        kv_head = work % KV_HEADS
        request, row, num_rows, _, _, lo, hi, shift = tile_of(
            query_start_loc, seq_lens, key_start_loc, first_token, num_reqs, request_tiles,
            num_tiles - 1 - work // KV_HEADS, left, right, chunk, PAGED, GROUP, BLOCK_M, HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
        )  # fmt: skip
        if num_rows > 0:
            mbarrier.wait(q_empty, (streams & 1) ^ 1)
            for half in gl.static_range(2):
                rows = half * HALF + half_rows
                token = (row + rows // GROUP).to(gl.int64)
                places = token * stride_qt + (kv_head * GROUP + rows % GROUP) * stride_qh
                _copy(q.index(half), query, places, rows < num_rows, D, BLOCK_D, LAYOUT)
            async_copy.mbarrier_arrive(q_full, increment_count=False)
            streams += 1
            k_head = k_cache + kv_head * stride_kh
            v_head = v_cache + kv_head * stride_vh
            table_row = block_table + gl.cast(request, gl.int64) * stride_table
            first = lo
            if FIXED:
                first = lo // BLOCK_N * BLOCK_N
            pages = _pages(table_row, first, lanes, hi, PAGED, BLOCK_SIZE)
            # Not `pages`: Triton takes two names of one value for a loop that never changes the second.
            before = gl.zeros_like(pages).to(gl.uint32)
            # A tile that sees no key has one tile of zeros.
            for begin in range(first, gl.maximum(hi, first + 1), BLOCK_N):
                key_rows = _rows(pages, begin, lanes, stride_kb, stride_kt, PAGED, BLOCK_SIZE)
                _copy_tile(
                    k, k_full, k_empty, copied, k_head, key_rows, begin, lanes, lo, hi, shift, stride_kt,
                    PAGED, False, FIXED, D, BLOCK_D, STAGES, LAYOUT,
                )  # fmt: skip
                if begin > first:
                    # Values come after the keys of the next tile, as they are used.
                    _copy_tile(
                        v, v_full, v_empty, copied - 1, v_head, before, begin - BLOCK_N, lanes, lo, hi, shift, stride_vt,
                        PAGED, True, FIXED, D, BLOCK_D, STAGES, LAYOUT,
                    )  # fmt: skip
                if PAGED:
                    before = key_rows
                else:
                    before = _rows(lanes, begin, lanes, stride_vb, stride_vt, False, BLOCK_SIZE)
                pages = _pages(table_row, begin + BLOCK_N, lanes, hi, PAGED, BLOCK_SIZE)
                copied += 1
            last = first + gl.maximum(hi - first - 1, 0) // BLOCK_N * BLOCK_N
            _copy_tile(
                v, v_full, v_empty, copied - 1, v_head, before, last, lanes, lo, hi, shift, stride_vt,
                PAGED, False, FIXED, D, BLOCK_D, STAGES, LAYOUT,
            )  # fmt: skip
        work += gl.num_programs(0)
