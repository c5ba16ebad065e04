"""The groups of prefill with specialised warps that attend: 64 rows of each tile, from queries to outputs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnplug.backends.triton.kernels.hopper.number_rows import as_float16, turned
from attnplug.backends.triton.kernels.hopper.prefill_loads import tile_of, work_of
from attnplug.backends.triton.kernels.hopper.prefill_weights import (
    WEIGHT_LOG,
    fold,
    opened,
    paired,
    row_sums,
    weigh,
)
from attnplug.backends.triton.kernels.ranges import common_range
from attnplug.backends.triton.kernels.scan import LN2, LOG2E
from attnplug.backends.triton.kernels.split_places import even_log, fold_weights, split_log, split_size


@gluon.jit
def _products(
    own,
    own_tail,
    k,
    k_tail,
    stage,
    HALF: gl.constexpr,
    BLOCK_N: gl.constexpr,
    TAIL: gl.constexpr,
    LOGITS: gl.constexpr,
):
    """Begin to multiply a group's queries with the keys of a tile."""
    zeros = gl.zeros([HALF, BLOCK_N], gl.float32, LOGITS)
    logits = warpgroup_mma(own, k.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    if TAIL:
        logits = warpgroup_mma(own_tail, k_tail.index(stage).permute((1, 0)), logits, is_async=True)
    return logits


@gluon.jit
def attend_tiles(
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
    cap,
    stride_ot,
    stride_oh,
    stride_lse,
    powers,
    signs,
    q,
    k,
    v,
    q_tail,
    k_tail,
    v_tail,
    full,
    empty,
    turns,
    KV_HEADS: gl.constexpr,
    PAGED: gl.constexpr,
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
    HAS_CAP: gl.constexpr,
    HAS_SINKS: gl.constexpr,
    HAS_LSE: gl.constexpr,
    FIXED: gl.constexpr,
    EVEN: gl.constexpr,
    NUMBERS: gl.constexpr,
    IN_TURN: gl.constexpr,
    HELD: gl.constexpr,
    SIDE: gl.constexpr,
):
    """Attend 64 rows of each tile: those of place SIDE."""
    HALF: gl.constexpr = 64
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    OUT_TAIL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL if TAIL else 16, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    STORE_TAIL: gl.constexpr = gl.BlockedLayout([1, min(TAIL // 8, 8) if TAIL else 1], [4, 8], [4, 1], [1, 0])
    SUMS: gl.constexpr = BLOCK_N // 2 if FIXED else 8
    REGISTERS: gl.constexpr = [[0, 1], [8, 0]] + [[0, 8], [0, 16]][: SUMS // 16]  # noqa: RUF005 - Gluon has no stars
    LANES: gl.constexpr = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    PARTS: gl.constexpr = gl.DistributedLinearLayout(REGISTERS, LANES, [[16, 0], [32, 0]], [], [HALF, SUMS])
    rows = SIDE * HALF + gl.arange(0, HALF, layout=ROWS)
    store_rows = SIDE * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, STORE))
    dims = gl.arange(0, BLOCK_D, layout=gl.SliceLayout(0, STORE))[None, :]
    if TAIL:
        dims_tail = gl.arange(0, TAIL, layout=gl.SliceLayout(0, STORE_TAIL))[None, :]
    lanes = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LOGITS))
    dtype: gl.constexpr = k.dtype
    base = scale * LOG2E
    slope = scale / cap
    if HAS_CAP:
        base = cap * LOG2E
    own = q.index(SIDE)
    own_tail = q_tail.index(SIDE)
    if NUMBERS:
        own = own._reinterpret(dtype, own.shape, own.type.layout)
        own_tail = own_tail._reinterpret(dtype, own_tail.shape, own_tail.type.layout)
    works = num_tiles * KV_HEADS
    work = work_of(0, request_tiles)
    turn = 1
    done = 0
    begun = 0
    while work < works:
        kv_head = work % KV_HEADS
        request, token, row, num_rows, first_pos, last_pos, lo, hi, _ = tile_of(
            query_start_loc, seq_lens, key_start_loc, first_token, num_reqs, request_tiles,
            num_tiles - 1 - work // KV_HEADS, left, right, chunk, PAGED, GROUP, BLOCK_M, HAS_LEFT, HAS_RIGHT, HAS_CHUNK,
        )  # fmt: skip
        if num_rows > 0:
            asked = row + gl.minimum(rows, num_rows - 1)
            positions = first_pos - row // GROUP + asked // GROUP
            full_lo, full_hi = common_range(
                first_pos, last_pos, lo, hi, 0, 0, left, right, chunk, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, False
            )
            top = gl.full([HALF], float("-inf"), gl.float32, ROWS)
            sums = gl.zeros([HALF, SUMS], gl.float32, PARTS)
            out = gl.zeros([HALF, BLOCK_D], gl.float32, OUT)
            if TAIL:
                out_tail = gl.zeros([HALF, TAIL], gl.float32, OUT_TAIL)
            held_top = top
            held_sums = sums
            if HAS_SINKS:
                sink = gl.load(sinks + kv_head * GROUP + asked % GROUP).to(gl.float32) * LOG2E
                if FIXED:
                    held_top = sink
                    held_sums += gl.where(
                        gl.arange(0, SUMS, layout=gl.SliceLayout(0, PARTS))[None, :] == 0, 1.0, 0.0
                    )
                elif NUMBERS == 0:
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
            mbarrier.wait(full.index(done % STAGES), done // STAGES & 1)
            unit = base
            if NUMBERS:
                factors = as_float16(q.index(SIDE), q_tail.index(SIDE), TAIL, STORE, STORE_TAIL)
                if NUMBERS == 2:
                    own.store(turned(own, signs, HALF, BLOCK_D, OUT).to(dtype))
                    fence_async_shared()
                power = gl.load(powers + request * KV_HEADS + kv_head)
                # With zero or infinity, a key that is not seen would be NaN.
                unit = gl.minimum(
                    gl.maximum(base * power * gl.convert_layout(factors, ROWS), 2.0**-126), 2.0**126
                )
            asking = own
            asking_tail = own_tail
            if HELD:
                asking = own.load(gl.DotOperandLayout(0, LOGITS, 2))
                if TAIL:
                    asking_tail = own_tail.load(gl.DotOperandLayout(0, LOGITS, 2))
            logits = _products(asking, asking_tail, k, k_tail, done % STAGES, HALF, BLOCK_N, TAIL, LOGITS)
            logits = warpgroup_mma_wait(0, deps=(logits,))
            mbarrier.arrive(empty.index(done % STAGES), count=1)
            weights, top, sums, fade = weigh(
                logits, top, sums, unit, slope, first, full_lo, full_hi, positions, lanes, lo, hi,
                left, right, chunk, BLOCK_N, SUMS, PARTS, ROWS, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, FIXED, NUMBERS,
            )  # fmt: skip
            pairs = paired(weights, dtype)
            done += 1
            mbarrier.wait(full.index(done % STAGES), done // STAGES & 1)
            for begin in range(first + BLOCK_N, hi, BLOCK_N):
                stage = done % STAGES
                held = opened(pairs, dtype, WEIGHTS)
                if IN_TURN:
                    # Group 0 begins; each waits for the one before it.
                    mbarrier.wait(turns.index(SIDE), (begun & 1) ^ (1 if SIDE == 0 else 0))
                    begun += 1
                logits = _products(asking, asking_tail, k, k_tail, stage, HALF, BLOCK_N, TAIL, LOGITS)
                out = warpgroup_mma(held, v.index(stage), out, use_acc=goes_on, is_async=True)
                if TAIL:
                    same = gl.convert_layout(held, gl.DotOperandLayout(0, OUT_TAIL, 2))
                    out_tail = warpgroup_mma(same, v_tail.index(stage), out_tail, is_async=True)
                if IN_TURN:
                    mbarrier.arrive(turns.index((SIDE + 1) % (BLOCK_M // HALF)), count=1)
                logits = warpgroup_mma_wait(2 if TAIL else 1, deps=(logits,))
                ends = False
                if FIXED:
                    # The values of the tile before are multiplied while this one is weighed, as the first of its split.
                    ends = begin == split_end
                    before = top
                    after = top
                    if ends:
                        split_end = begin + split_size(begin, even)
                        before, after, held_top = fold_weights(held_top, top)
                        held_sums = fold(held_sums, sums, before, after, PARTS)
                        top = gl.full([HALF], float("-inf"), gl.float32, ROWS)
                        sums = gl.zeros([HALF, SUMS], gl.float32, PARTS)
                weights, top, sums, fade = weigh(
                    logits, top, sums, unit, slope, begin, full_lo, full_hi, positions, lanes, lo, hi,
                    left, right, chunk, BLOCK_N, SUMS, PARTS, ROWS, HAS_LEFT, HAS_RIGHT, HAS_CHUNK, HAS_CAP, FIXED, NUMBERS,
                )  # fmt: skip
                # The compiler would move the wait for the values before the weights, and does not past one for a barrier.
                done += 1
                mbarrier.wait(full.index(done % STAGES), done // STAGES & 1)
                # The products read what is held until they are done.
                if TAIL:
                    out, out_tail, _used = warpgroup_mma_wait(0, deps=(out, out_tail, held))
                else:
                    out, _used = warpgroup_mma_wait(0, deps=(out, held))
                mbarrier.arrive(empty.index(stage), count=1)
                if FIXED:
                    if ends:
                        folded = fold(folded, out, before, after, OUT)
                    goes_on = not ends
                out = out * gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
                if TAIL:
                    out_tail = out_tail * gl.convert_layout(fade, gl.SliceLayout(1, OUT_TAIL))[:, None]
                pairs = paired(weights, dtype)
            held = opened(pairs, dtype, WEIGHTS)
            out = warpgroup_mma(held, v.index(done % STAGES), out, use_acc=goes_on, is_async=True)
            if TAIL:
                same = gl.convert_layout(held, gl.DotOperandLayout(0, OUT_TAIL, 2))
                out_tail = warpgroup_mma(same, v_tail.index(done % STAGES), out_tail, is_async=True)
                found, found_tail = warpgroup_mma_wait(0, deps=(out, out_tail))
            else:
                found = warpgroup_mma_wait(0, deps=(out,))
            mbarrier.arrive(empty.index(done % STAGES), count=1)
            done += 1
            if FIXED:
                before, after, top = fold_weights(held_top, top)
                found = fold(folded, found, before, after, OUT)
                total = row_sums(fold(held_sums, sums, before, after, PARTS), ROWS)
            else:
                total = gl.convert_layout(gl.sum(sums, 1), ROWS)
                own_sum = total
                if HAS_SINKS:
                    sink = gl.load(sinks + kv_head * GROUP + asked % GROUP).to(gl.float32) * LOG2E
                    if NUMBERS:
                        # Float16 has no weights beside a sink that is far above all keys, so theirs shrink at the end.
                        highest = gl.maximum(top, sink)
                        pivot = gl.where(highest == float("-inf"), 0.0, highest)
                        shrink = gl.exp2(top - pivot)
                        total = total * shrink + gl.exp2(sink - pivot + WEIGHT_LOG)
                        top = highest
                    else:
                        total += gl.exp2(sink - gl.where(top == float("-inf"), 0.0, top))
            nothing = total == 0.0
            safe = gl.where(nothing, 1.0, total)
            value_unit = value_scale
            if NUMBERS:
                value_unit = value_scale * gl.load(powers + (num_reqs + request) * KV_HEADS + kv_head)
                if HAS_SINKS:
                    value_unit = value_unit * shrink
            if NUMBERS == 2:
                # Outputs are turned as float16, so the sum of the keys' weights divides them first.
                own_sum = gl.where(own_sum == 0.0, 1.0, own_sum)
                found = found * gl.convert_layout(1.0 / own_sum, gl.SliceLayout(1, OUT))[:, None]
                rotated = gl.convert_layout(found.to(dtype), WEIGHTS)
                found = turned(rotated, signs.permute((1, 0)), HALF, BLOCK_D, OUT)
                found = (
                    found * gl.convert_layout(value_unit * (own_sum / safe), gl.SliceLayout(1, OUT))[:, None]
                )
            elif FIXED:
                found = found * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, OUT))[:, None] * value_unit
            else:
                found = found * gl.convert_layout(value_unit / safe, gl.SliceLayout(1, OUT))[:, None]
            stored = row + store_rows
            places = output + (token + stored // GROUP).to(gl.int64) * stride_ot
            places += (kv_head * GROUP + stored % GROUP) * stride_oh
            found = gl.convert_layout(found.to(output.dtype.element_ty), STORE)
            there = (store_rows < num_rows)[:, None]
            gl.store(places[:, None] + dims, found, mask=there & (dims < D) if D < BLOCK_D else there)
            if TAIL:
                found_tail = (
                    found_tail * gl.convert_layout(value_unit / safe, gl.SliceLayout(1, OUT_TAIL))[:, None]
                )
                found_tail = gl.convert_layout(found_tail.to(output.dtype.element_ty), STORE_TAIL)
                places = (
                    gl.convert_layout(places, gl.SliceLayout(1, STORE_TAIL))[:, None] + BLOCK_D + dims_tail
                )
                there = gl.convert_layout(store_rows < num_rows, gl.SliceLayout(1, STORE_TAIL))[:, None]
                gl.store(places, found_tail, mask=there & (dims_tail < D - BLOCK_D))
            if HAS_LSE:
                if NUMBERS:
                    top -= WEIGHT_LOG
                out_lse = gl.where(nothing, float("-inf"), top + gl.log2(safe)) * LN2
                at = (token + asked // GROUP).to(gl.int64) * stride_lse + kv_head * GROUP + asked % GROUP
                gl.store(lse + at, out_lse, mask=rows < num_rows)
        work = work_of(turn, request_tiles)
        turn += 1
