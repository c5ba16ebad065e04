"""Decode over latents (MLA) on Hopper for up to 32 rows at once: keys are the rows of its matrix products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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
    """Begin the products of tile `number` with the queries, once it is there: `[BLOCK_N, BLOCK_M]`."""
    stage = number % STAGES
    mbarrier.wait(full.index(stage), number // STAGES & 1, pred=is_there)
    fence_async_shared()
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, LOGITS)
    logits = warpgroup_mma(k_low.index(stage), q_low.permute((1, 0)), zeros, use_acc=False, is_async=True)
    logits = warpgroup_mma(k_high.index(stage), q_high.permute((1, 0)), logits, is_async=True)
    if ROPE:
        logits = warpgroup_mma(k_rope.index(stage), q_rope.permute((1, 0)), logits, is_async=True)
    return logits


@gluon.jit
def _write(out, places, there, FIRST: gl.constexpr, LATENT: gl.constexpr, OUT: gl.constexpr):
    """Half of the elements, from FIRST on, of rows that are columns of `out`."""
    dims = FIRST + gl.arange(0, LATENT // 2, layout=gl.SliceLayout(1, OUT))[:, None]
    gl.store(places[None, :] + dims, out, mask=there[None, :])


@gluon.jit
def _attend(
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
    q_full,
    q_empty,
    full,
    empty,
    HEADS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    LATENT: gl.constexpr,
    ROPE: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_LSE: gl.constexpr,
    CONVERTS: gl.constexpr,
):
    """BLOCK_M rows of each request, as columns."""
    HALF: gl.constexpr = LATENT // 2
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LOGITS)
    row_block = gl.program_id(0)
    rows = row_block * BLOCK_M + gl.arange(0, BLOCK_M, layout=COLUMNS)
    lanes = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LOGITS))
    share = gl.program_id(1)
    begin, end, request = share_of(tiles, num_reqs)
    tile = begin
    streams = 0
    done = 0
    while tile < end:
        first, stop, last_tile, token, query_len, seq_len = request_of(
            query_start_loc, seq_lens, tiles, request, end
        )
        num_rows = query_len * HEADS
        if (row_block * BLOCK_M < num_rows) & (last_tile > tile):
            last = seq_len - query_len + gl.minimum(rows, num_rows - 1) // HEADS
            # Every query sees the keys before this one.
            common = seq_len - query_len + 1
            top = gl.full([BLOCK_M], float("-inf"), gl.float32, COLUMNS)
            # Sums of each thread, added to each other only at the end.
            sums = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, LOGITS)
            low = gl.zeros([HALF, BLOCK_M], gl.float32, LOGITS)
            high = gl.zeros([HALF, BLOCK_M], gl.float32, LOGITS)
            lo = (tile - first) * BLOCK_N
            hi = gl.minimum((last_tile - first) * BLOCK_N, seq_len)
            mbarrier.wait(q_full, streams & 1)
            unit = gl.full([BLOCK_M], scale * LOG2E, gl.float32, COLUMNS)
            if CONVERTS:
                half_low, half_high, half_rope, factors = scaled_queries(q_low, q_high, q_rope, ROPE)
                unit *= gl.convert_layout(factors, COLUMNS)
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
                    logits = gl.where((start + lanes)[:, None] <= last[None, :], logits, float("-inf"))
                new_top = gl.maximum(top, gl.max(logits, 0) * unit)
                pivot = gl.where(new_top == float("-inf"), 0.0, new_top)
                weights = gl.exp2(logits * unit[None, :] - pivot[None, :])
                fade = gl.exp2(top - pivot)[None, :]
                top = new_top
                shared_weights.store(weights.to(k_low.dtype))
                fence_async_shared()
                low = low * fade
                high = high * fade
                stage = done % STAGES
                low = warpgroup_mma(k_low.index(stage).permute((1, 0)), shared_weights, low, is_async=True)
                high = warpgroup_mma(k_high.index(stage).permute((1, 0)), shared_weights, high, is_async=True)
                done += 1
                # The next logits follow without a pause; those behind the last tile are of no use.
                logits = _logits(
                    half_low, half_high, half_rope, k_low, k_high, k_rope, full, done, start + BLOCK_N < hi,
                    BLOCK_M, BLOCK_N, ROPE, STAGES, LOGITS,
                )  # fmt: skip
                sums = sums * fade + weights
                if ROPE:
                    low, high = warpgroup_mma_wait(3, deps=(low, high))
                else:
                    low, high = warpgroup_mma_wait(2, deps=(low, high))
                mbarrier.arrive(empty.index(stage), count=1)
                logits = warpgroup_mma_wait(0, deps=(logits,))
            mbarrier.arrive(q_empty, count=1)
            streams += 1
            total = gl.sum(sums, 0)
            nothing = total == 0.0
            safe = gl.where(nothing, 1.0, total)
            out_lse = gl.where(nothing, float("-inf"), top + gl.log2(safe))
            low = low / safe[None, :]
            high = high / safe[None, :]
            there = rows < num_rows
            at = token.to(gl.int64) * HEADS + rows
            if (first >= begin) & (stop <= end):
                dtype: gl.constexpr = output.dtype.element_ty
                _write(low.to(dtype), output + at * LATENT, there, 0, LATENT, LOGITS)
                _write(high.to(dtype), output + at * LATENT, there, HALF, LATENT, LOGITS)
                if HAS_LSE:
                    gl.store(lse + at, out_lse * LN2, mask=there)
            else:
                at = (2 * share + gl.where(first >= begin, 1, 0)).to(gl.int64) * max_rows + rows
                _write(low, partials + at * LATENT, there, 0, LATENT, LOGITS)
                _write(high, partials + at * LATENT, there, HALF, LATENT, LOGITS)
                gl.store(partial_lses + at, out_lse, mask=there)
        tile = last_tile
        request += 1


# Values that differ between steps, or between a step and a graph's buffers, must not compile another kernel.
@gluon.jit(
    do_not_specialize=["num_reqs", "max_rows", "stride_table"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table", "lse"],
)
def latent_narrow_kernel(
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
):
    """As latent_decode_kernel, for queries of 16 bits, latents of their type or of 8 bits, and rows of whole 16 bytes."""
    CONVERTS: gl.constexpr = cache.dtype.element_ty.primitive_bitwidth == 8
    own: gl.constexpr = q_nope.dtype.element_ty
    dtype: gl.constexpr = gl.float16 if CONVERTS else own
    ARRIVALS: gl.constexpr = 1 if CONVERTS else 128
    q_low, q_high, q_rope, k_low, k_high, k_rope, q_full, q_empty, full, empty = buffers(
        own, dtype, BLOCK_M, BLOCK_N, LATENT, ROPE, STAGES, ARRIVALS, 1
    )
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    shared_weights = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_M], WEIGHTS)
    if CONVERTS:
        gl.warp_specialize(
            [
                (_attend, (
                    output, lse, query_start_loc, seq_lens, tiles, partials, partial_lses, num_reqs, max_rows, scale,
                    q_low, q_high, q_rope, k_low, k_high, k_rope, shared_weights, q_full, q_empty, full, empty,
                    HEADS, BLOCK_M, BLOCK_N, LATENT, ROPE, STAGES, HAS_LSE, CONVERTS,
                )),
                (convert_tiles, (
                    q_nope, q_pe, cache, query_start_loc, seq_lens, block_table, tiles, num_reqs, stride_table,
                    stride_block, q_low, q_high, q_rope, k_low, k_high, k_rope, q_full, q_empty, full, empty,
                    HEADS, BLOCK_M, BLOCK_N, LATENT, ROPE, STAGES, stride_token, BLOCK_SIZE,
                    gl.constexpr(0), gl.constexpr(2),
                )),
                (convert_tiles, (
                    q_nope, q_pe, cache, query_start_loc, seq_lens, block_table, tiles, num_reqs, stride_table,
                    stride_block, q_low, q_high, q_rope, k_low, k_high, k_rope, q_full, q_empty, full, empty,
                    HEADS, BLOCK_M, BLOCK_N, LATENT, ROPE, STAGES, stride_token, BLOCK_SIZE,
                    gl.constexpr(1), gl.constexpr(2),
                )),
            ],
            [4, 4],
            [168 if BLOCK_M == 16 else 128, 168 if BLOCK_M == 16 else 128],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (
                    output, lse, query_start_loc, seq_lens, tiles, partials, partial_lses, num_reqs, max_rows, scale,
                    q_low, q_high, q_rope, k_low, k_high, k_rope, shared_weights, q_full, q_empty, full, empty,
                    HEADS, BLOCK_M, BLOCK_N, LATENT, ROPE, STAGES, HAS_LSE, CONVERTS,
                )),
                (copy_tiles, (
                    q_nope, q_pe, cache, query_start_loc, seq_lens, block_table, tiles, num_reqs, stride_table,
                    stride_block, q_low, q_high, q_rope, k_low, k_high, k_rope, q_full, q_empty, full, empty,
                    HEADS, BLOCK_M, BLOCK_N, LATENT, ROPE, STAGES, stride_token, BLOCK_SIZE,
                )),
            ],
            [4],
            [96],
        )  # fmt: skip
