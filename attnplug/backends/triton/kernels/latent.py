"""Decode over latents (MLA): every program takes an equal share of all keys, across the borders of requests."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug.backends.triton.kernels.scan import LN2, LOG2E, finish
from attnplug.backends.triton.kernels.shares import wait_for_inputs


@triton.jit
def _pages(table_row, start, seq_len, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The page of a tile, or of each of its keys where pages are smaller; the null block past the last key."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table_row + start // BLOCK_SIZE, mask=start < seq_len, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        return tl.load(table_row + keys // BLOCK_SIZE, mask=keys < seq_len, other=0)


@triton.jit
def _part(places, there, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """`SIZE` elements from each of `places [n, 1]`, padded to BLOCK with zeros, and zeros where nothing is there."""
    dims = tl.arange(0, BLOCK)
    mask = there[:, None]
    if BLOCK > SIZE:
        mask = mask & (dims < SIZE)[None, :]
    return tl.load(places + dims[None, :], mask=mask, other=0.0)


# Values that differ between steps, or between a step and a graph's buffers, must not compile another kernel.
@triton.jit(
    do_not_specialize=["num_reqs", "max_rows", "stride_table"],
    do_not_specialize_on_alignment=["query_start_loc", "seq_lens", "block_table", "lse"],
)
def latent_decode_kernel(
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
    stride_token: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """BLOCK_M rows of each request in one share of the keys, as plan_shares_kernel divides them.

    Row i is head `i % HEADS` of the token `i // HEADS`. Queries, outputs and LSE are contiguous. A request that is in
    one share alone is written to `output`. A part of another goes to `partials [2 * shares, max_rows, LATENT]`, and its
    LSE, in base 2, to `partial_lses`: share c has
    the places 2c, for a request that an earlier share began, and 2c + 1, for one that a later share ends. Products
    are of the type COMPUTE, or of that of the queries where it is None.
    """
    if PDL:
        wait_for_inputs()
    row_block = tl.program_id(0)
    share = tl.program_id(1)
    size = tl.load(tiles + num_reqs + 2)
    begin = share * size
    end = tl.minimum(begin + size, tl.load(tiles + num_reqs))
    if begin >= end:
        return
    request = tl.load(tiles + num_reqs + 3 + share)
    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = rows % HEADS
    dims = tl.arange(0, BLOCK_L)
    lanes = tl.arange(0, BLOCK_N)
    tile = begin
    while tile < end:
        first = tl.load(tiles + request)
        stop = tl.load(tiles + request + 1)
        last_tile = tl.minimum(stop, end)
        token = tl.load(query_start_loc + request)
        query_len = tl.load(query_start_loc + request + 1) - token
        num_rows = query_len * HEADS
        if (row_block * BLOCK_M < num_rows) & (last_tile > tile):
            seq_len = tl.load(seq_lens + request)
            inside = rows < num_rows
            own = tl.minimum(rows, num_rows - 1) // HEADS
            places = ((token + own).to(tl.int64) * HEADS + heads)[:, None]
            q = _part(q_nope + places * LATENT, inside, LATENT, BLOCK_L)
            pe = q
            if ROPE:
                pe = _part(q_pe + places * ROPE, inside, ROPE, BLOCK_R)
            if COMPUTE is not None:
                q = q.to(COMPUTE)
                pe = pe.to(COMPUTE)
            last = seq_len - query_len + own
            # Every query sees the keys before this one.
            common = seq_len - query_len + 1
            top = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
            lo = (tile - first) * BLOCK_N
            hi = tl.minimum((last_tile - first) * BLOCK_N, seq_len)
            table_row = block_table + request.to(tl.int64) * stride_table
            # Look up the next tile's pages during this tile, so that loads of keys do not wait for the table.
            next_blocks = _pages(table_row, lo, seq_len, BLOCK_SIZE, BLOCK_N)
            for start in tl.range(lo, hi, BLOCK_N):
                keys = start + lanes
                page = cache + next_blocks.to(tl.int64) * stride_block
                next_blocks = _pages(table_row, start + BLOCK_N, seq_len, BLOCK_SIZE, BLOCK_N)
                if BLOCK_SIZE % BLOCK_N == 0:
                    latent_rows = page + (start % BLOCK_SIZE) * stride_token + (lanes * stride_token)[:, None]
                else:
                    latent_rows = (page + (keys % BLOCK_SIZE) * stride_token)[:, None]
                # Rows past the last key may hold anything, and NaN times a weight of 0 is NaN.
                latents = _part(latent_rows, keys < seq_len, LATENT, BLOCK_L).to(q.dtype)
                logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                # The small product comes first: each warp group computes the first of two on its own.
                if ROPE:
                    k_pe = _part(latent_rows + LATENT, keys < seq_len, ROPE, BLOCK_R).to(q.dtype)
                    logits = tl.dot(pe, tl.trans(k_pe), logits, input_precision="ieee")
                logits = tl.dot(q, tl.trans(latents), logits, input_precision="ieee")
                if start + BLOCK_N > common:
                    logits = tl.where(keys[None, :] <= last[:, None], logits, float("-inf"))
                new_top = tl.maximum(top, tl.max(logits, 1) * (scale * LOG2E))
                pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
                weights = tl.exp2(logits * (scale * LOG2E) - pivot[:, None])
                fade = tl.exp2(top - pivot)
                total = total * fade + tl.sum(weights, 1)
                acc = tl.dot(weights.to(q.dtype), latents, acc * fade[:, None], input_precision="ieee")
                top = new_top
            out, out_lse = finish(acc, top, total)
            mask = inside[:, None]
            if BLOCK_L > LATENT:
                mask = mask & (dims < LATENT)[None, :]
            if (first >= begin) & (stop <= end):
                tl.store(output + places * LATENT + dims[None, :], out.to(output.dtype.element_ty), mask=mask)
                if HAS_LSE:
                    at = (token + own).to(tl.int64) * HEADS + heads
                    tl.store(lse + at, out_lse * LN2, mask=inside)
            else:
                place = 2 * share + tl.where(first >= begin, 1, 0)
                here = place.to(tl.int64) * max_rows + rows
                tl.store(partials + here[:, None] * LATENT + dims[None, :], out, mask=mask)
                tl.store(partial_lses + here, out_lse, mask=inside)
        tile = last_tile
        request += 1
