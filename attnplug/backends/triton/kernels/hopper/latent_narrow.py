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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnplug.backends.triton.kernels.hopper.latent_bytes import (
    SPAN,
    byte_values,
    queries_in_parts,
    sum_of_parts,
    write_values,
)
from attnplug.backends.triton.kernels.hopper.latent_loads import (
    buffers,
    copy_tiles,
    request_of,
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
    BYTES: gl.constexpr,
):
    """Begin the products of tile `number` with the queries, once it is there: sums `[BLOCK_N, BLOCK_M]`, or of both parts."""
    stage = number % STAGES
    mbarrier.wait(full.index(stage), number // STAGES & 1, pred=is_there)
    COLUMNS: gl.constexpr = 2 * BLOCK_M if BYTES else BLOCK_M
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32 if BYTES else 16])
    zeros = gl.zeros([BLOCK_N, COLUMNS], gl.float32, PRODUCT)
    fence_async_shared()
    low = warpgroup_mma(k_low.index(stage), q_low.permute((1, 0)), zeros, use_acc=False, is_async=True)
    # Products of 8 bits add up with about 14 bits. So few do, and their sums add up in float32.
    sums = zeros if BYTES else low
    high = warpgroup_mma(k_high.index(stage), q_high.permute((1, 0)), sums, use_acc=not BYTES, is_async=True)
    if ROPE:
        columns = q_rope.permute((1, 0))
        if BYTES:
            low = warpgroup_mma(k_rope.index(stage), columns, low, is_async=True)
        else:
            high = warpgroup_mma(k_rope.index(stage), columns, high, is_async=True)
    return (low, high) if BYTES else (high,)


@gluon.jit
def _waited(logits, LOGITS: gl.constexpr, BYTES: gl.constexpr):
    """The sum of what `_logits` began, once all products are done."""
    sums = warpgroup_mma_wait(0, deps=logits)
    if BYTES:
        sums = sum_of_parts(sums[0] + sums[1], LOGITS)
    return sums


@gluon.jit
def _add_values(out, fade, k_low, k_high, weights, LOGITS: gl.constexpr, BYTES: gl.constexpr):
    """Begin to multiply the sums in `out` with `fade`, and to add a tile's latents with their weights."""
    HALVES: gl.constexpr = len(out) // 2
    faded = ()
    for part in gl.static_range(len(out)):
        faded += (out[part] * fade,)
    sums = ()
    for part in gl.static_range(len(out)):
        if part < HALVES:
            latents = k_low
        else:
            latents = k_high
        if BYTES:
            total = byte_values(
                latents.slice(part % HALVES * SPAN, SPAN, dim=1), weights, faded[part], LOGITS
            )
        else:
            total = warpgroup_mma(latents.permute((1, 0)), weights, faded[part], is_async=True)
        sums += (total,)
    return sums


@gluon.jit
def _write(out, places, there, LATENT: gl.constexpr, LOGITS: gl.constexpr, BYTES: gl.constexpr):
    """The rows whose elements `out` has in its columns."""
    SIZE: gl.constexpr = LATENT // len(out)
    dtype: gl.constexpr = places.dtype.element_ty
    for part in gl.static_range(len(out)):
        if BYTES:
            write_values(out[part].to(dtype), places, there, part * SIZE)
        else:
            dims = part * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, LOGITS))[:, None]
            gl.store(places[None, :] + dims, out[part].to(dtype), mask=there[None, :])


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
    BYTES: gl.constexpr,
):
    """BLOCK_M rows of each request, as columns."""
    PARTS: gl.constexpr = LATENT // SPAN if BYTES else 2
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
            out = ()
            for _ in gl.static_range(PARTS):
                out += (gl.zeros([LATENT // PARTS, BLOCK_M], gl.float32, LOGITS),)
            lo = (tile - first) * BLOCK_N
            hi = gl.minimum((last_tile - first) * BLOCK_N, seq_len)
            mbarrier.wait(q_full, streams & 1)
            unit = gl.full([BLOCK_M], scale * LOG2E, gl.float32, COLUMNS)
            if BYTES:
                own_low, own_high, own_rope, factors = queries_in_parts(q_low, q_high, q_rope, ROPE)
                unit *= gl.convert_layout(factors, COLUMNS)
            else:
                own_low, own_high, own_rope = q_low, q_high, q_rope
            # A request without keys has a tile that nobody loads.
            begun = _logits(
                own_low, own_high, own_rope, k_low, k_high, k_rope, full, done, lo < hi,
                BLOCK_M, BLOCK_N, ROPE, STAGES, BYTES,
            )  # fmt: skip
            logits = _waited(begun, LOGITS, BYTES)
            for start in range(lo, hi, BLOCK_N):
                if start + BLOCK_N > common:
                    logits = gl.where((start + lanes)[:, None] <= last[None, :], logits, float("-inf"))
                new_top = gl.maximum(top, gl.max(logits, 0) * unit)
                pivot = gl.where(new_top == float("-inf"), 0.0, new_top)
                weights = gl.exp2(logits * unit[None, :] - pivot[None, :])
                fade = gl.exp2(top - pivot)[None, :]
                top = new_top
                shared_weights.store(weights.to(shared_weights.dtype))
                fence_async_shared()
                stage = done % STAGES
                out = _add_values(
                    out, fade, k_low.index(stage), k_high.index(stage), shared_weights, LOGITS, BYTES
                )
                done += 1
                if BYTES:
                    # The tile is in registers.
                    mbarrier.arrive(empty.index(stage), count=1)
                # The next logits follow without a pause; those behind the last tile are of no use.
                begun = _logits(
                    own_low, own_high, own_rope, k_low, k_high, k_rope, full, done, start + BLOCK_N < hi,
                    BLOCK_M, BLOCK_N, ROPE, STAGES, BYTES,
                )  # fmt: skip
                sums = sums * fade + weights
                if not BYTES:
                    # Products with values, which came first, end first.
                    out = warpgroup_mma_wait(3 if ROPE else 2, deps=out)
                    mbarrier.arrive(empty.index(stage), count=1)
                logits = _waited(begun, LOGITS, BYTES)
                if BYTES:
                    out = warpgroup_mma_wait(0, deps=out)
            mbarrier.arrive(q_empty, count=1)
            streams += 1
            total = gl.sum(sums, 0)
            nothing = total == 0.0
            safe = gl.where(nothing, 1.0, total)
            out_lse = gl.where(nothing, float("-inf"), top + gl.log2(safe))
            means = ()
            for part in gl.static_range(PARTS):
                means += (out[part] / safe[None, :],)
            there = rows < num_rows
            at = token.to(gl.int64) * HEADS + rows
            if (first >= begin) & (stop <= end):
                _write(means, output + at * LATENT, there, LATENT, LOGITS, BYTES)
                if HAS_LSE:
                    gl.store(lse + at, out_lse * LN2, mask=there)
            else:
                at = (2 * share + gl.where(first >= begin, 1, 0)).to(gl.int64) * max_rows + rows
                _write(means, partials + at * LATENT, there, LATENT, LOGITS, BYTES)
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
    PDL: gl.constexpr,
):
    """As latent_decode_kernel, for queries of 16 bits, latents of their type, and rows of whole 16 bytes.

    Latents may have 8 bits if queries are bfloat16, and the rope part is of 0, 32 or 64 elements.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    BYTES: gl.constexpr = cache.dtype.element_ty.primitive_bitwidth == 8
    own: gl.constexpr = q_nope.dtype.element_ty
    q_low, q_high, q_rope, k_low, k_high, k_rope, q_full, q_empty, full, empty = buffers(
        own, cache.dtype.element_ty, BLOCK_M, BLOCK_N, LATENT, ROPE, STAGES, 128, 1
    )
    product: gl.constexpr = gl.float16 if BYTES else own
    # Two programs share a multiprocessor then, so the group that copies leaves registers to the one that multiplies.
    LOADS: gl.constexpr = 40 if BYTES and BLOCK_M == 16 else 96
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], product)
    shared_weights = gl.allocate_shared_memory(product, [BLOCK_N, BLOCK_M], WEIGHTS)
    gl.warp_specialize(
        [
            (_attend, (
                output, lse, query_start_loc, seq_lens, tiles, partials, partial_lses, num_reqs, max_rows, scale,
                q_low, q_high, q_rope, k_low, k_high, k_rope, shared_weights, q_full, q_empty, full, empty,
                HEADS, BLOCK_M, BLOCK_N, LATENT, ROPE, STAGES, HAS_LSE, BYTES,
            )),
            (copy_tiles, (
                q_nope, q_pe, cache, query_start_loc, seq_lens, block_table, tiles, num_reqs, stride_table,
                stride_block, q_low, q_high, q_rope, k_low, k_high, k_rope, q_full, q_empty, full, empty,
                HEADS, BLOCK_M, BLOCK_N, LATENT, ROPE, STAGES, stride_token, BLOCK_SIZE,
            )),
        ],
        [4],
        [LOADS],
    )  # fmt: skip
