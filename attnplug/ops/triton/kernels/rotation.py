"""Rows turned by a matrix of ones and minus ones, in tensor cores and to the last bits of float32."""

from __future__ import annotations

import triton
import triton.language as tl

_MOST_LOG = tl.constexpr(8)
"""Of the longest row, which has 256 elements."""


@triton.jit
def turned(
    rows, matrix, stride_in, stride_out, factor, D: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr
):
    """Float32 rows `[R, D]` times the first COLUMNS of `matrix [D, D]`, times `factor`; both are powers of two from 16 on.

    The matrix is bfloat16, which has its numbers exactly. PARTS terms of bfloat16 have those of the rows: 1 is exact for
    rows of bfloat16, 2 for float16 and 3 for float32. With 0 the product is one of float32, for the interpreter.
    """
    columns = tl.arange(0, COLUMNS)[None, :]
    signs = tl.load(matrix + tl.arange(0, D)[:, None] * stride_in + columns * stride_out)
    return multiplied(rows, signs, PARTS) * factor


@triton.jit
def multiplied(rows, signs, PARTS: tl.constexpr):
    """Float32 rows times a bfloat16 matrix of 1, 0 and -1; see `turned`."""
    if PARTS == 0:
        found = tl.dot(rows, signs.to(tl.float32), input_precision="ieee")
    else:
        found = tl.zeros([rows.shape[0], signs.shape[1]], tl.float32)
        for _ in tl.static_range(PARTS):
            part = rows.to(tl.bfloat16)
            found = tl.dot(part, signs, found)
            rows = rows - part.to(tl.float32)
    return found


@triton.jit
def turned_whole(
    rows,
    matrix,
    stride_in,
    factor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    """All columns of rows `[R, D]` turned, where each BLOCK of a row is multiplied by signs and a Hadamard matrix.

    With IN_ORDER they are the sums of `Rotated4Codec.rotate`, in its order, for rows of any numbers; the compiler must not
    fuse products with sums then. Else tensor cores add up to SIDE elements, whose matrix has 8 KB, and PARTS is as in
    `turned`: the matrix of a row of 256 elements takes 128 KB of shared memory, which few GPUs have.
    """
    R: tl.constexpr = rows.shape[0]
    SIDE: tl.constexpr = 1 if IN_ORDER else min(max(BLOCK, 16), 64)
    dims = tl.arange(0, D)
    # The first column of a block has its signs.
    signs = tl.load(matrix + dims * stride_in + dims // BLOCK * BLOCK).to(tl.float32)
    if IN_ORDER:
        rows = rows * signs[None, :] * factor
    else:
        inner = tl.arange(0, SIDE)
        place = matrix + inner[:, None] * stride_in
        # The interpreter multiplies bfloat16 as integers.
        square = tl.load(place + inner[None, :]).to(tl.float32)
        square *= tl.load(place + inner[:, None] // BLOCK * BLOCK).to(tl.float32)
        rows = (rows * signs[None, :]).reshape(R * D // SIDE, SIDE)
        rows = multiplied(rows, square.to(tl.bfloat16), PARTS).reshape(R, D)
    for log in tl.static_range(_MOST_LOG):
        # Elements at a distance of a power of two are added, and subtracted. A constant of each turn has no name, because
        # the compiler gives a name one value.
        if (1 << log) >= SIDE and (1 << log) < BLOCK:
            one, other = tl.split(rows.reshape(R, D >> (log + 1), 2, 1 << log).permute(0, 1, 3, 2))
            rows = tl.join(one + other, one - other).permute(0, 1, 3, 2).reshape(R, D)
    return rows if IN_ORDER else rows * factor


@triton.jit
def sum_in_order(rows):
    """The sums of rows `[R, D]`, halves added to halves, as the codec adds them."""
    for _ in tl.static_range(_MOST_LOG):
        if rows.shape[1] > 1:
            halves = rows.reshape(rows.shape[0], 2, rows.shape[1] // 2).permute(0, 2, 1)
            one, other = tl.split(halves)
            rows = one + other
    return rows.reshape(rows.shape[0])


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=["query_start_loc"])
def turn_kernel(
    rows,
    output,
    matrix,
    query_start_loc,
    num_reqs,
    stride_rt,
    stride_rh,
    stride_ot,
    stride_oh,
    stride_in,
    stride_out,
    factor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """COLUMNS of the rows of all tokens of requests, TILE of (token, head) per program; padding is not written."""
    first = tl.load(query_start_loc)
    count = (tl.load(query_start_loc + num_reqs) - first) * HEADS
    begin = tl.program_id(0) * TILE
    if begin >= count:
        return
    at = begin + tl.arange(0, TILE)
    inside = (at < count)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    tokens = (first + at // HEADS).to(tl.int64)
    heads = (at % HEADS).to(tl.int64)
    places = rows + (tokens * stride_rt + heads * stride_rh)[:, None] + dims
    x = tl.load(places, mask=inside & (dims < D), other=0.0).to(tl.float32)
    skipped = tl.program_id(1) * COLUMNS
    y = turned(x, matrix + skipped * stride_out, stride_in, stride_out, factor, BLOCK_D, COLUMNS, PARTS)
    columns = skipped + tl.arange(0, COLUMNS)[None, :]
    into = output + (tokens * stride_ot + heads * stride_oh)[:, None] + columns
    tl.store(into, y.to(output.dtype.element_ty), mask=inside & (columns < D))
