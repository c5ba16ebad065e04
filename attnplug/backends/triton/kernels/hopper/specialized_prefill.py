"""Prefill and extend on Hopper with specialised warps: two groups attend half of a tile's rows each, a third copies.

Queries, keys and values are copied while the tiles before them are attended. Each group multiplies the weights of one tile
with its values, and the queries with the keys of the next, during the softmax of the other group and its own.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnplug.backends.triton.kernels.hopper.prefill_loads import copy_tiles, tile_of
from attnplug.backends.triton.kernels.ranges import common_range
from attnplug.backends.triton.kernels.scan import LN2, LOG2E
from attnplug.backends.triton.kernels.split_places import even_log, fold_weights, split_log, split_size


@gluon.jit
def _weigh(
    logits,
    top,
    sums,
    unit,
    begin,
    full_lo,
    full_hi,
    positions,
    lanes,
    lo,
    hi,
    left,
    right,
    chunk,
    BLOCK_N: gl.constexpr,
    SUMS: gl.constexpr,
    PARTS: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_CHUNK: gl.constexpr,
):
    """Weights of a tile, the maximum (base 2), sums, and what was summed before is multiplied with."""
    ROWS: gl.constexpr = logits.shape[0]
    if (begin < full_lo) | (begin + BLOCK_N > full_hi):
        keys = (begin + lanes)[None, :]
        seen = (keys >= lo) & (keys < hi)
        at = positions[:, None]
        if HAS_LEFT:
            seen = seen & (keys >= at - left)
        if HAS_RIGHT:
            seen = seen & (keys <= at + right)
        if HAS_CHUNK:
            inside = gl.maximum(at, 0)
            seen = seen & (keys // chunk == inside // chunk) & (at >= 0)
        logits = gl.where(seen, logits, float("-inf"))
    new_top = gl.maximum(top, gl.max(logits, 1) * unit)
    pivot = gl.where(new_top == float("-inf"), 0.0, new_top)
    weights = gl.exp2(gl.fma(logits, unit, -pivot[:, None]))
    fade = gl.exp2(top - pivot)
    parts = gl.sum(weights.reshape([ROWS, BLOCK_N // SUMS, SUMS]), 1)
    fades = gl.convert_layout(fade, gl.SliceLayout(1, PARTS))[:, None]
    sums = gl.fma(sums, fades, gl.convert_layout(parts, PARTS))
    return weights, new_top, sums, fade


@gluon.jit
def _row_sums(sums, ROWS: gl.constexpr):
    """The sum of each row, as in_one_order; four threads have two columns each of every eight."""
    low, high = gl.split(sums.reshape([sums.shape[0], sums.shape[1] // 2, 2]))
    sums = low + high
    sums += _of_lane(sums, 1)
    sums += _of_lane(sums, 2)
    # All columns of an eight have its sum now.
    for _ in gl.static_range(3):
        if sums.shape[1] > 4:
            low, high = gl.split(gl.permute(sums.reshape([sums.shape[0], 2, sums.shape[1] // 2]), (0, 2, 1)))
            sums = low + high
    return gl.convert_layout(gl.max(sums, 1), ROWS)


@gluon.jit
def _of_lane(values, DISTANCE: gl.constexpr):
    """What the thread DISTANCE lanes away has of `values`."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;",
        "=r,r,n",
        [values, DISTANCE],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _fold(held, more, before, after, LAYOUT: gl.constexpr):
    """What is held of the splits before, and that of one split more, with their factors."""
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    before = gl.convert_layout(before, ROWS)[:, None]
    return gl.fma(more, gl.convert_layout(after, ROWS)[:, None], held * before)


@gluon.jit
def _attend(
    output,
    lse,
    query_start_loc,
    seq_lens,
    key_start_loc,
    sinks,
    first_token,
    num_reqs,
    num_tiles,
    request_tiles,
    left,
    right,
    chunk,
    scale,
    value_scale,
    stride_ot,
    stride_oh,
    stride_lse,
    q,
    k,
    v,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    turns,
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
    HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr,
    TURNS: gl.constexpr,
    FIXED: gl.constexpr,
    EVEN: gl.constexpr,
    SIDE: gl.constexpr,
):
    """Attend half of the rows of each tile, the lower or the upper one."""
    HALF: gl.constexpr = BLOCK_M // 2
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    SUMS: gl.constexpr = BLOCK_N // 2 if FIXED else 8
    REGISTERS: gl.constexpr = [[0, 1], [8, 0]] + [[0, 8], [0, 16]][: SUMS // 16]  # noqa: RUF005 - Gluon has no stars
    LANES: gl.constexpr = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    PARTS: gl.constexpr = gl.DistributedLinearLayout(REGISTERS, LANES, [[16, 0], [32, 0]], [], [HALF, SUMS])
    rows = SIDE * HALF + gl.arange(0, HALF, layout=ROWS)
    store_rows = SIDE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, STORE))
    dims = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, STORE))[None, :]
    lanes = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LOGITS))
    dtype: gl.constexpr = k.dtype
    unit = scale * LOG2E
    own = q.index(SIDE)
    works = num_tiles * KV_HEADS
    work = gl.program_id(0)
    streams = 0
    done = 0
    turn = 0
    while work < works:
        kv_head = work % KV_HEADS
        request, row, num_rows, first_pos, last_pos, lo, hi, _ = tile_of(
            query_start_loc, seq_lens, key_start_loc, first_token, num_reqs, request_tiles,
            num_tiles - 1 - work // KV_HEADS, left, right, chunk, PAGED, GROUP, BLOCK_M, HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
        )  # fmt: skip
        if num_rows > 0:
            positions = first_pos + gl.minimum(rows, num_rows - 1) // GROUP
            full_lo, full_hi = common_range(
                first_pos, last_pos, lo, hi, 0, 0, left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, False
            )
            top = gl.full([HALF], float("-inf"), gl.float32, ROWS)
            sums = gl.zeros([HALF, SUMS], gl.float32, PARTS)
            out = gl.zeros([HALF, BLOCK_D], gl.float32, OUT)
            held_top = top
            held_sums = sums
            if HAS_SINKS:
                sink = gl.load(sinks + kv_head * GROUP + rows % GROUP).to(gl.float32) * LOG2E
                if FIXED:
                    held_top = sink
                    held_sums += gl.where(
                        gl.arange(0, SUMS, layout=gl.SliceLayout(0, PARTS))[None, :] == 0, 1.0, 0.0
                    )
                else:
                    top = sink
            first = lo
            goes_on = True
            if FIXED:
                goes_on = lo >= 0
                first = lo // BLOCK_N * BLOCK_N
                query_len = gl.load(query_start_loc + request + 1) - gl.load(query_start_loc + request)
                even = even_log(gl.load(seq_lens + request), query_len, EVEN)
                log = split_log(first, even)
                split_end = ((first >> log) + 1) << log
                folded = gl.zeros([HALF, BLOCK_D], gl.float32, OUT)
            mbarrier.wait(q_full, streams & 1)
            mbarrier.wait(k_full.index(done % STAGES), done // STAGES & 1)
            fence_async_shared()
            if TURNS:
                mbarrier.wait(turns.index(SIDE), turn & 1)
                turn += 1
            zeros = gl.zeros([HALF, BLOCK_N], gl.float32, LOGITS)
            logits = warpgroup_mma(
                own, k.index(done % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True
            )
            if TURNS:
                mbarrier.arrive(turns.index(1 - SIDE), count=1)
            logits = warpgroup_mma_wait(0, deps=(logits,))
            mbarrier.arrive(k_empty.index(done % STAGES), count=1)
            weights, top, sums, fade = _weigh(
                logits, top, sums, unit, first, full_lo, full_hi, positions, lanes, lo, hi,
                left, right, chunk, BLOCK_N, SUMS, PARTS, HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
            )  # fmt: skip
            held = gl.convert_layout(weights.to(dtype), WEIGHTS)
            for begin in range(first + BLOCK_N, hi, BLOCK_N):
                stage = done % STAGES
                done += 1
                coming = done % STAGES
                mbarrier.wait(k_full.index(coming), done // STAGES & 1)
                mbarrier.wait(v_full.index(stage), (done - 1) // STAGES & 1)
                fence_async_shared()
                if TURNS:
                    mbarrier.wait(turns.index(SIDE), turn & 1)
                    turn += 1
                zeros = gl.zeros([HALF, BLOCK_N], gl.float32, LOGITS)
                logits = warpgroup_mma(
                    own, k.index(coming).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                out = warpgroup_mma(held, v.index(stage), out, use_acc=goes_on, is_async=True)
                if TURNS:
                    mbarrier.arrive(turns.index(1 - SIDE), count=1)
                logits = warpgroup_mma_wait(1, deps=(logits,))
                mbarrier.arrive(k_empty.index(coming), count=1)
                ends = False
                if FIXED:
                    # The values of the tile before are multiplied while this one is weighed, as the first of its split.
                    ends = begin == split_end
                    before = top
                    after = top
                    if ends:
                        split_end = begin + split_size(begin, even)
                        before, after, held_top = fold_weights(held_top, top)
                        held_sums = _fold(held_sums, sums, before, after, PARTS)
                        top = gl.full([HALF], float("-inf"), gl.float32, ROWS)
                        sums = gl.zeros([HALF, SUMS], gl.float32, PARTS)
                weights, top, sums, fade = _weigh(
                    logits, top, sums, unit, begin, full_lo, full_hi, positions, lanes, lo, hi,
                    left, right, chunk, BLOCK_N, SUMS, PARTS, HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
                )  # fmt: skip
                out = warpgroup_mma_wait(0, deps=(out,))
                mbarrier.arrive(v_empty.index(stage), count=1)
                if FIXED:
                    if ends:
                        folded = _fold(folded, out, before, after, OUT)
                    goes_on = not ends
                out = out * gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
                held = gl.convert_layout(weights.to(dtype), WEIGHTS)
            mbarrier.arrive(q_empty, count=1)
            streams += 1
            mbarrier.wait(v_full.index(done % STAGES), done // STAGES & 1)
            fence_async_shared()
            out = warpgroup_mma(held, v.index(done % STAGES), out, use_acc=goes_on, is_async=True)
            found = warpgroup_mma_wait(0, deps=(out,))
            mbarrier.arrive(v_empty.index(done % STAGES), count=1)
            done += 1
            if FIXED:
                before, after, top = fold_weights(held_top, top)
                found = _fold(folded, found, before, after, OUT)
                total = _row_sums(_fold(held_sums, sums, before, after, PARTS), ROWS)
            else:
                total = gl.convert_layout(gl.sum(sums, 1), ROWS)
                if HAS_SINKS:
                    sink = gl.load(sinks + kv_head * GROUP + rows % GROUP).to(gl.float32) * LOG2E
                    total += gl.exp2(sink - gl.where(top == float("-inf"), 0.0, top))
            nothing = total == 0.0
            safe = gl.where(nothing, 1.0, total)
            if FIXED:
                found = found * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, OUT))[:, None] * value_scale
            else:
                found = found * gl.convert_layout(value_scale / safe, gl.SliceLayout(1, OUT))[:, None]
            token = (row + store_rows // GROUP).to(gl.int64)
            places = output + token * stride_ot + (kv_head * GROUP + store_rows % GROUP) * stride_oh
            found = gl.convert_layout(found.to(output.dtype.element_ty), STORE)
            there = (store_rows < num_rows)[:, None]
            if D < BLOCK_D:
                there = there & (dims < D)
            gl.store(places[:, None] + dims, found, mask=there)
            if HAS_LSE:
                out_lse = gl.where(nothing, float("-inf"), top + gl.log2(safe)) * LN2
                at = (row + rows // GROUP).to(gl.int64) * stride_lse + kv_head * GROUP + rows % GROUP
                gl.store(lse + at, out_lse, mask=rows < num_rows)
        work += gl.num_programs(0)


# Values that differ between steps must not compile another kernel.
@gluon.jit(
    do_not_specialize=[
        "first_token",
        "num_reqs",
        "num_tiles",
        "request_tiles",
        "left",
        "right",
        "chunk",
        "stride_table",
        "stride_lse",
    ],
    do_not_specialize_on_alignment=[
        "lse",
        "query_start_loc",
        "seq_lens",
        "block_table",
        "key_start_loc",
        "mm_spans",
    ],
)
def specialized_prefill_kernel(
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
    num_tiles,
    request_tiles,
    scale,
    value_scale,
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
    HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr,
    TURNS: gl.constexpr,
    FIXED: gl.constexpr,
    EVEN: gl.constexpr,
):
    """As prefill_kernel, for queries and keys of 16 bits, heads of equal size, and strides of whole 32 bytes.

    Tiles have BLOCK_D columns, a power of two; those past D are zeros.

    Each program takes tiles in turn, those late in their requests first; `tile_of` says whose they are. With TURNS the
    groups that attend begin their products one after the other.
    """
    dtype: gl.constexpr = query.dtype.element_ty
    HALF: gl.constexpr = BLOCK_M // 2
    QUERIES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, BLOCK_D], dtype)
    KEYS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    q = gl.allocate_shared_memory(dtype, [2, HALF, BLOCK_D], QUERIES)
    k = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], KEYS)
    v = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], KEYS)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=128)
    mbarrier.init(q_empty, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=128)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=128)
        mbarrier.init(v_empty.index(stage), count=2)
    for side in gl.static_range(2):
        mbarrier.init(turns.index(side), count=1)
    if TURNS:
        mbarrier.arrive(turns.index(0), count=1)
    gl.warp_specialize(
        [
            (_attend, (
                output, lse, query_start_loc, seq_lens, key_start_loc, sinks, first_token, num_reqs, num_tiles,
                request_tiles, left, right, chunk, scale, value_scale, stride_ot, stride_oh, stride_lse,
                q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
                KV_HEADS, PAGED, BLOCK_SIZE, GROUP, BLOCK_M, BLOCK_N, D, BLOCK_D, STAGES,
                HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SINKS, HAS_LSE, TURNS, FIXED, EVEN, gl.constexpr(0),
            )),
            (_attend, (
                output, lse, query_start_loc, seq_lens, key_start_loc, sinks, first_token, num_reqs, num_tiles,
                request_tiles, left, right, chunk, scale, value_scale, stride_ot, stride_oh, stride_lse,
                q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
                KV_HEADS, PAGED, BLOCK_SIZE, GROUP, BLOCK_M, BLOCK_N, D, BLOCK_D, STAGES,
                HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_SINKS, HAS_LSE, TURNS, FIXED, EVEN, gl.constexpr(1),
            )),
            (copy_tiles, (
                query, k_cache, v_cache, query_start_loc, seq_lens, block_table, key_start_loc, first_token, num_reqs,
                num_tiles, request_tiles, left, right, chunk, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb,
                stride_vt, stride_vh, stride_table, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                KV_HEADS, PAGED, BLOCK_SIZE, GROUP, BLOCK_M, BLOCK_N, D, BLOCK_D, STAGES,
                HAS_LEFT, HAS_RIGHT, HAS_CHUNK, FIXED,
            )),
        ],
        [4, 4],
        [224, 56] if FIXED else [208, 72],
    )  # fmt: skip
