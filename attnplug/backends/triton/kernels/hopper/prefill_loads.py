"""The tiles of prefill on Hopper, and the group of warps that copies their queries, keys and values."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

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
    """Tile `tile`: its request, and the first token of that; the first of its rows, and their number; and what they see.

    Row i of a request is head `i % GROUP` of token `i // GROUP`. The first and last position come next, then the keys
    `lo .. hi - 1`. Key i of the call is in row `i + shift`. Each request has `request_tiles` tiles, one request after the
    other, or where that is negative the first tiles of all requests come first. If it is 0, the first tile of a request is
    `start // BLOCK_M + request`, in rows. Tiles past its queries have no rows.
    """
    alike = request_tiles != 0
    by_place = request_tiles < 0
    each = gl.maximum(gl.where(by_place, -request_tiles, request_tiles), 1)
    low = gl.where(alike, gl.where(by_place, tile % num_reqs, tile // each), 0)
    high = gl.where(alike, low + 1, num_reqs)
    while high - low > 1:
        middle = (low + high) // 2
        begin = (gl.load(query_start_loc + middle) - first_token) * GROUP
        is_later = begin // BLOCK_M + middle <= tile
        low = gl.where(is_later, middle, low)
        high = gl.where(is_later, high, middle)
    request = low
    first = gl.load(query_start_loc + request)
    query_len = gl.load(query_start_loc + request + 1) - first
    seq_len = gl.load(seq_lens + request)
    place = tile - gl.where(alike, request * each, (first - first_token) * GROUP // BLOCK_M + request)
    row = gl.where(by_place, tile // num_reqs, place) * BLOCK_M
    num_rows = gl.minimum(gl.maximum(query_len * GROUP - row, 0), BLOCK_M)
    first_pos = seq_len - query_len + row // GROUP
    last_pos = seq_len - query_len + (row + num_rows - 1) // GROUP
    first_key = 0
    shift = 0
    if not PAGED:
        keys_start = gl.load(key_start_loc + request)
        first_key = seq_len - (gl.load(key_start_loc + request + 1) - keys_start)
        shift = keys_start - first_key
    lo, hi = key_range(
        first_pos, last_pos, first_key, seq_len, left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK
    )
    return request, first, row, num_rows, first_pos, last_pos, lo, hi, shift


@gluon.jit
def work_of(turn, request_tiles):
    """The tile and KV head that a program takes in a turn, as one number.

    Where the first tiles of all requests come first, programs turn round in each turn: work with a lower number is longer.
    """
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    is_back = (request_tiles < 0) & (turn % 2 == 1)
    return turn * programs + gl.where(is_back, programs - 1 - program, program)


@gluon.jit
def _copy(
    target,
    tail,
    head,
    rows,
    there,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    TAIL: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Begin to copy rows of D elements to both parts of a tile, as `_copy_part`."""
    _copy_part(target, head, rows, there, min(D, BLOCK_D), BLOCK_D, LAYOUT)
    if TAIL:
        # The same threads copy the rest of a row, so that its place is computed once: 4, 8 or 16 bytes each.
        REST: gl.constexpr = gl.BlockedLayout([1, min(TAIL // 8, 8)], [4, 8], [4, 1], [1, 0])
        rows = gl.convert_layout(rows, gl.SliceLayout(1, REST))
        if there is not None:
            there = gl.convert_layout(there, gl.SliceLayout(1, REST))
        _copy_part(tail, head + BLOCK_D, rows, there, D - BLOCK_D, TAIL, REST)


@gluon.jit
def _copy_part(
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
    tail,
    stage,
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
    TAIL: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Begin to copy a tile of keys or values to place `stage`; all of a WHOLE tile is before `hi`.

    Only with FIXED a tile may begin before `lo`.
    """
    if not PAGED:
        head += gl.cast(begin + shift, gl.int64) * stride_token
    places = rows.to(gl.int64) * UNIT
    if FIXED:
        if (begin >= lo) & (begin + lanes.shape[0] <= hi):
            _copy(target.index(stage), tail.index(stage), head, places, None, D, BLOCK_D, TAIL, LAYOUT)
        else:
            there = (begin + lanes >= lo) & (begin + lanes < hi)
            _copy(target.index(stage), tail.index(stage), head, places, there, D, BLOCK_D, TAIL, LAYOUT)
    elif WHOLE:
        _copy(target.index(stage), tail.index(stage), head, places, None, D, BLOCK_D, TAIL, LAYOUT)
    elif begin + lanes.shape[0] <= hi:
        _copy(target.index(stage), tail.index(stage), head, places, None, D, BLOCK_D, TAIL, LAYOUT)
    else:
        _copy(
            target.index(stage), tail.index(stage), head, places, begin + lanes < hi, D, BLOCK_D, TAIL, LAYOUT
        )


@gluon.jit
def _publish(full, LATER: gl.constexpr):
    """Tell the other groups that copies are there: all but those of the LATER parts begun last."""
    async_copy.wait_group(LATER)
    # Products read shared memory past what orders threads.
    fence_async_shared()
    mbarrier.arrive(full, count=1)


@gluon.jit
def _copy_whole(
    target,
    tail,
    stage,
    tiles,
    tail_tiles,
    row,
    column,
    ready,
    BLOCK_D: gl.constexpr,
    TAIL: gl.constexpr,
):
    """Begin to copy a whole tile of keys or values of the call, as a block of a matrix; `ready` counts its bytes."""
    tma.async_copy_global_to_shared(tiles, [row, column], ready, target.index(stage))
    if TAIL:
        tma.async_copy_global_to_shared(tail_tiles, [row, column + BLOCK_D], ready, tail.index(stage))


@gluon.jit
def copy_tiles(
    query,
    k_cache,
    v_cache,
    k_tiles,
    v_tiles,
    k_tail_tiles,
    v_tail_tiles,
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
    q_tail,
    k_tail,
    v_tail,
    full,
    empty,
    KV_HEADS: gl.constexpr,
    PAGED: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    D: gl.constexpr,
    BLOCK_D: gl.constexpr,
    TAIL: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_CHUNK: gl.constexpr,
    FIXED: gl.constexpr,
):
    """Copy the queries of each tile, then its keys and values, as soon as all other groups are done with their place.

    Part i of a stream has keys of tile i, and values of tile i - 1, as they are used; part 0 has the queries too.

    With `k_tiles` and the like, parts of whole tiles but the first are copied as blocks, which tell the others themselves.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    HALF: gl.constexpr = 64
    # With three places a part may be on its way while the next one begins.
    LATER: gl.constexpr = 1 if STAGES > 2 else 0
    BLOCKS: gl.constexpr = k_tiles is not None
    BYTES: gl.constexpr = BLOCK_N * D * (k.dtype.primitive_bitwidth // 8)
    lanes = gl.arange(0, BLOCK_N, layout=ROWS)
    half_rows = gl.arange(0, HALF, layout=ROWS)
    works = num_tiles * KV_HEADS
    work = work_of(0, request_tiles)
    turn = 1
    copied = 0
    while work < works:
        kv_head = work % KV_HEADS
        request, token, row, num_rows, _, _, lo, hi, shift = tile_of(
            query_start_loc, seq_lens, key_start_loc, first_token, num_reqs, request_tiles,
            num_tiles - 1 - work // KV_HEADS, left, right, chunk, PAGED, GROUP, BLOCK_M, HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
        )  # fmt: skip
        if num_rows > 0:
            # The queries before are no longer read once the last keys before, two parts ago, are done.
            last_keys = copied + STAGES - 2
            mbarrier.wait(empty.index(last_keys % STAGES), (last_keys // STAGES & 1) ^ 1)
            for half in gl.static_range(BLOCK_M // HALF):
                rows = half * HALF + half_rows
                asked = row + rows
                places = (token + asked // GROUP).to(gl.int64) * stride_qt
                places += (kv_head * GROUP + asked % GROUP) * stride_qh
                there = rows < num_rows
                _copy(q.index(half), q_tail.index(half), query, places, there, D, BLOCK_D, TAIL, LAYOUT)
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
                stage = copied % STAGES
                mbarrier.wait(empty.index(stage), (copied // STAGES & 1) ^ 1)
                key_rows = _rows(pages, begin, lanes, stride_kb, stride_kt, PAGED, BLOCK_SIZE)
                if BLOCKS and (begin > first) & (begin + BLOCK_N <= hi):
                    ready = full.index(stage)
                    mbarrier.expect(ready, 2 * BYTES)
                    _copy_whole(
                        k, k_tail, stage, k_tiles, k_tail_tiles, begin + shift, kv_head * stride_kh, ready,
                        BLOCK_D, TAIL,
                    )  # fmt: skip
                    _copy_whole(
                        v, v_tail, stage, v_tiles, v_tail_tiles, begin - BLOCK_N + shift, kv_head * stride_vh,
                        ready, BLOCK_D, TAIL,
                    )  # fmt: skip
                    if LATER:
                        if begin == first + BLOCK_N:
                            _publish(full.index((copied - 1) % STAGES), 0)
                else:
                    _copy_tile(
                        k, k_tail, stage, k_head, key_rows, begin, lanes, lo, hi, shift, stride_kt,
                        PAGED, False, FIXED, D, BLOCK_D, TAIL, LAYOUT,
                    )  # fmt: skip
                    if begin > first:
                        _copy_tile(
                            v, v_tail, stage, v_head, before, begin - BLOCK_N, lanes, lo, hi, shift, stride_vt,
                            PAGED, True, FIXED, D, BLOCK_D, TAIL, LAYOUT,
                        )  # fmt: skip
                    async_copy.commit_group()
                    if LATER == 0:
                        _publish(full.index(stage), 0)
                    elif BLOCKS:
                        # Others before have told it themselves.
                        if begin == first + BLOCK_N:
                            _publish(full.index((copied - 1) % STAGES), LATER)
                    elif begin > first:
                        _publish(full.index((copied - 1) % STAGES), LATER)
                if PAGED:
                    before = key_rows
                else:
                    before = _rows(lanes, begin, lanes, stride_vb, stride_vt, False, BLOCK_SIZE)
                pages = _pages(table_row, begin + BLOCK_N, lanes, hi, PAGED, BLOCK_SIZE)
                copied += 1
            last = first + gl.maximum(hi - first - 1, 0) // BLOCK_N * BLOCK_N
            stage = copied % STAGES
            mbarrier.wait(empty.index(stage), (copied // STAGES & 1) ^ 1)
            if BLOCKS and (last > first) & (last + BLOCK_N <= hi):
                ready = full.index(stage)
                mbarrier.expect(ready, BYTES)
                _copy_whole(
                    v,
                    v_tail,
                    stage,
                    v_tiles,
                    v_tail_tiles,
                    last + shift,
                    kv_head * stride_vh,
                    ready,
                    BLOCK_D,
                    TAIL,
                )
            else:
                _copy_tile(
                    v, v_tail, stage, v_head, before, last, lanes, lo, hi, shift, stride_vt,
                    PAGED, False, FIXED, D, BLOCK_D, TAIL, LAYOUT,
                )  # fmt: skip
                async_copy.commit_group()
                if LATER:
                    _publish(full.index((copied - 1) % STAGES), LATER)
                _publish(full.index(stage), 0)
            copied += 1
        work = work_of(turn, request_tiles)
        turn += 1
