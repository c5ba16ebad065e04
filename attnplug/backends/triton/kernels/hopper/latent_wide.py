"""Decode over latents (MLA) on Hopper for up to 64 rows at once: groups of warps load, weigh and follow."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.backends.triton.kernels.hopper.latent_loads import (
    buffers,
    convert_tiles,
    copy_tiles,
    request_of,
    scaled_queries,
    share_of,
)
from attnplug.backends.triton.kernels.scan import LN2, LOG2E


@gluon.jit
def _write(
    out,
    token,
    rows,
    num_rows,
    is_whole,
    output,
    partials,
    place,
    LATENT: gl.constexpr,
    UPPER: gl.constexpr,
    OUT: gl.constexpr,
):
    """Half of the rows of a request: its output, or the part of it that this share has."""
    HALF: gl.constexpr = LATENT // 2
    dims = UPPER * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, OUT))[None, :]
    mask = (rows < num_rows)[:, None]
    if is_whole:
        gl.store(output + (token + rows)[:, None] * LATENT + dims, out.to(output.dtype.element_ty), mask=mask)
    else:
        gl.store(partials + (place + rows)[:, None] * LATENT + dims, out, mask=mask)


@gluon.jit
def _weigh(
    output,
    lse,
    query_start_loc,
    seq_lens,
    tiles,
    partials,
    partial_lses,
    num_reqs,
    max_rows,
    scale,
    q_low,
    q_high,
    q_rope,
    k_low,
    k_high,
    k_rope,
    shared_weights,
    shared_factors,
    q_full,
    q_empty,
    full,
    empty,
    weights_full,
    weights_empty,
    HEADS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    LATENT: gl.constexpr,
    ROPE: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_LSE: gl.constexpr,
    CONVERTS: gl.constexpr,
):
    """The weights of BLOCK_M rows of each request, handed to the other group too, and the lower half of the output."""
    HALF: gl.constexpr = LATENT // 2
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    row_block = gl.program_id(0)
    rows = row_block * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LOGITS))
    out_rows = row_block * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, OUT))
    lanes = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LOGITS))
    share = gl.program_id(1)
    begin, end, request = share_of(tiles, num_reqs)
    tile = begin
    streams = 0
    done = 0
    messages = 0
    while tile < end:
        first, stop, last_tile, token, query_len, seq_len = request_of(
            query_start_loc, seq_lens, tiles, request, end
        )
        num_rows = query_len * HEADS
        if (row_block * BLOCK_M < num_rows) & (last_tile > tile):
            last = seq_len - query_len + gl.minimum(rows, num_rows - 1) // HEADS
            # Every query sees the keys before this one.
            common = seq_len - query_len + 1
            top = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))
            total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, LOGITS))
            acc = gl.zeros([BLOCK_M, HALF], gl.float32, OUT)
            lo = (tile - first) * BLOCK_N
            hi = gl.minimum((last_tile - first) * BLOCK_N, seq_len)
            mbarrier.wait(q_full, streams & 1)
            unit = gl.full([BLOCK_M], scale * LOG2E, gl.float32, gl.SliceLayout(1, LOGITS))
            if CONVERTS:
                half_low, half_high, half_rope, factors = scaled_queries(q_low, q_high, q_rope, ROPE)
                unit *= gl.convert_layout(factors, gl.SliceLayout(1, LOGITS))
            else:
                half_low, half_high, half_rope = q_low, q_high, q_rope
            # A request without keys has a tile that nobody loads.
            logits = _logits(
                half_low, half_high, half_rope, k_low, k_high, k_rope, full, done, lo < hi,
                BLOCK_M, BLOCK_N, ROPE, STAGES, LOGITS,
            )  # fmt: skip
            logits = warpgroup_mma_wait(0, deps=(logits,))
            for start in range(lo, hi, BLOCK_N):
                if start + BLOCK_N > common:
                    logits = gl.where((start + lanes)[None, :] <= last[:, None], logits, float("-inf"))
                new_top = gl.maximum(top, gl.max(logits, 1) * unit)
                pivot = gl.where(new_top == float("-inf"), 0.0, new_top)
                weights = gl.exp2(logits * unit[:, None] - pivot[:, None])
                fade = gl.exp2(top - pivot)
                top = new_top
                halves = weights.to(k_low.dtype)
                mbarrier.wait(weights_empty, (messages & 1) ^ 1)
                shared_weights.store(halves)
                shared_factors.store(fade)
                fence_async_shared()
                mbarrier.arrive(weights_full, count=1)
                messages += 1
                total = total * fade + gl.sum(weights, 1)
                acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
                stage = done % STAGES
                acc = warpgroup_mma(
                    gl.convert_layout(halves, WEIGHTS), k_low.index(stage), acc, is_async=True
                )
                done += 1
                # The next logits follow without a pause; those behind the last tile are of no use.
                logits = _logits(
                    half_low, half_high, half_rope, k_low, k_high, k_rope, full, done, start + BLOCK_N < hi,
                    BLOCK_M, BLOCK_N, ROPE, STAGES, LOGITS,
                )  # fmt: skip
                if ROPE:
                    acc = warpgroup_mma_wait(3, deps=(acc,))
                else:
                    acc = warpgroup_mma_wait(2, deps=(acc,))
                mbarrier.arrive(empty.index(stage), count=1)
                logits = warpgroup_mma_wait(0, deps=(logits,))
            mbarrier.arrive(q_empty, count=1)
            streams += 1
            nothing = total == 0.0
            safe = gl.where(nothing, 1.0, total)
            mbarrier.wait(weights_empty, (messages & 1) ^ 1)
            shared_factors.store(1.0 / safe)
            mbarrier.arrive(weights_full, count=1)
            messages += 1
            out_lse = gl.where(nothing, float("-inf"), top + gl.log2(safe))
            out = acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, OUT))[:, None]
            is_whole = (first >= begin) & (stop <= end)
            at = token.to(gl.int64) * HEADS
            place = (2 * share + gl.where(first >= begin, 1, 0)).to(gl.int64) * max_rows
            _write(out, at, out_rows, num_rows, is_whole, output, partials, place, LATENT, False, OUT)
            if is_whole:
                if HAS_LSE:
                    gl.store(lse + at + rows, out_lse * LN2, mask=rows < num_rows)
            else:
                gl.store(partial_lses + place + rows, out_lse, mask=rows < num_rows)
        tile = last_tile
        request += 1


@gluon.jit
def _logits(
    q_low,
    q_high,
    q_rope,
    k_low,
    k_high,
    k_rope,
    full,
    number,
    is_there,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROPE: gl.constexpr,
    STAGES: gl.constexpr,
    LOGITS: gl.constexpr,
):
    """Begin the products of the queries with tile `number`, once it is there."""
    stage = number % STAGES
    mbarrier.wait(full.index(stage), number // STAGES & 1, pred=is_there)
    fence_async_shared()
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LOGITS)
    low = k_low.index(stage).permute((1, 0))
    logits = warpgroup_mma(q_low, low, zeros, use_acc=False, is_async=True)
    logits = warpgroup_mma(q_high, k_high.index(stage).permute((1, 0)), logits, is_async=True)
    if ROPE:
        logits = warpgroup_mma(q_rope, k_rope.index(stage).permute((1, 0)), logits, is_async=True)
    return logits


@gluon.jit
def _follow(
    output,
    query_start_loc,
    seq_lens,
    tiles,
    partials,
    num_reqs,
    max_rows,
    k_high,
    shared_weights,
    shared_factors,
    empty,
    weights_full,
    weights_empty,
    HEADS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    LATENT: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The upper half of the output, with the weights and factors of the group that computes them."""
    HALF: gl.constexpr = LATENT // 2
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    FACTORS: gl.constexpr = gl.SliceLayout(1, OUT)
    row_block = gl.program_id(0)
    rows = row_block * BLOCK_M + gl.arange(0, BLOCK_M, layout=FACTORS)
    share = gl.program_id(1)
    begin, end, request = share_of(tiles, num_reqs)
    tile = begin
    done = 0
    messages = 0
    while tile < end:
        first, stop, last_tile, token, query_len, seq_len = request_of(
            query_start_loc, seq_lens, tiles, request, end
        )
        num_rows = query_len * HEADS
        if (row_block * BLOCK_M < num_rows) & (last_tile > tile):
            acc = gl.zeros([BLOCK_M, HALF], gl.float32, OUT)
            lo = (tile - first) * BLOCK_N
            for _ in range(lo, gl.minimum((last_tile - first) * BLOCK_N, seq_len), BLOCK_N):
                stage = done % STAGES
                mbarrier.wait(weights_full, messages & 1)
                fence_async_shared()
                acc = acc * shared_factors.load(FACTORS)[:, None]
                acc = warpgroup_mma(shared_weights, k_high.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(weights_empty, count=1)
                mbarrier.arrive(empty.index(stage), count=1)
                done += 1
                messages += 1
            mbarrier.wait(weights_full, messages & 1)
            out = acc * shared_factors.load(FACTORS)[:, None]
            mbarrier.arrive(weights_empty, count=1)
            messages += 1
            is_whole = (first >= begin) & (stop <= end)
            at = token.to(gl.int64) * HEADS
            place = (2 * share + gl.where(first >= begin, 1, 0)).to(gl.int64) * max_rows
            _write(out, at, rows, num_rows, is_whole, output, partials, place, LATENT, True, OUT)
        tile = last_tile
        request += 1


# Values that differ between steps, or between a step and a graph's buffers, must not compile another kernel.
@gluon.jit(
    do_not_specialize=["num_reqs", "max_rows", "stride_table"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table", "lse"],
)
def latent_wide_kernel(
    q_nope,
    q_pe,
    cache,
    output,
    lse,
    query_start_loc,
    seq_lens,
    block_table,
    tiles,
    partials,
    partial_lses,
    num_reqs,
    max_rows,
    stride_table,
    scale,
    stride_block,
    stride_token: gl.constexpr,
    HEADS: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    LATENT: gl.constexpr,
    ROPE: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_LSE: gl.constexpr,
    PDL: gl.constexpr,
):
    """As latent_decode_kernel, for queries of 16 bits, latents of their type or of 8 bits, and rows of whole 16 bytes."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    CONVERTS: gl.constexpr = cache.dtype.element_ty.primitive_bitwidth == 8
    own: gl.constexpr = q_nope.dtype.element_ty
    dtype: gl.constexpr = gl.float16 if CONVERTS else own
    ARRIVALS: gl.constexpr = 1 if CONVERTS else 128
    q_low, q_high, q_rope, k_low, k_high, k_rope, q_full, q_empty, full, empty = buffers(
        own, dtype, BLOCK_M, BLOCK_N, LATENT, ROPE, STAGES, ARRIVALS, 2
    )
    # Weights of a tile, and what the sums before it are multiplied with; behind the last tile, one over the total.
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], dtype)
    shared_weights = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], SQUARE)
    shared_factors = gl.allocate_shared_memory(gl.float32, [BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    weights_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    weights_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(weights_full, count=1)
    mbarrier.init(weights_empty, count=1)
    gl.warp_specialize(
        [
            (_weigh, (
                output, lse, query_start_loc, seq_lens, tiles, partials, partial_lses, num_reqs, max_rows, scale,
                q_low, q_high, q_rope, k_low, k_high, k_rope, shared_weights, shared_factors,
                q_full, q_empty, full, empty, weights_full, weights_empty,
                HEADS, BLOCK_M, BLOCK_N, LATENT, ROPE, STAGES, HAS_LSE, CONVERTS,
            )),
            (_follow, (
                output, query_start_loc, seq_lens, tiles, partials, num_reqs, max_rows,
                k_high, shared_weights, shared_factors, empty, weights_full, weights_empty,
                HEADS, BLOCK_M, BLOCK_N, LATENT, STAGES,
            )),
            (convert_tiles if CONVERTS else copy_tiles, (
                q_nope, q_pe, cache, query_start_loc, seq_lens, block_table, tiles, num_reqs, stride_table,
                stride_block, q_low, q_high, q_rope, k_low, k_high, k_rope, q_full, q_empty, full, empty,
                HEADS, BLOCK_M, BLOCK_N, LATENT, ROPE, STAGES, stride_token, BLOCK_SIZE,
            )),
        ],
        [4, 4],
        [160 if CONVERTS else 208, 136 if CONVERTS else 56],
    )  # fmt: skip
