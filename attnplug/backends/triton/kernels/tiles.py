"""Loading what the kernels multiply: tiles of queries, keys and values."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug.backends.triton.kernels.formats import SHIFT, STEP

_HALVES = """{{
.reg .b16 low, high;
.reg .b32 first, second;
mov.b32 {{low, high}}, $2;
cvt.rn.f16x2.{stored}x2 first, low;
cvt.rn.f16x2.{stored}x2 second, high;
prmt.b32 $0, first, second, 0x5410;
prmt.b32 $1, first, second, 0x7632;
}}"""
E4M3_HALVES = tl.constexpr(_HALVES.format(stored="e4m3"))
E5M2_HALVES = tl.constexpr(_HALVES.format(stored="e5m2"))


@triton.jit
def of_head(scale, kv_head):
    """The scale of a KV head: `scale` is a number for all of them, or points to one for each."""
    # The interpreter passes numbers as those of Python, which have no dtype.
    if isinstance(scale, tl.tensor) and scale.dtype.is_ptr():
        scale = tl.load(scale + kv_head)
    return scale


@triton.jit
def load_queries(
    query,
    rows,
    num_rows,
    first_token,
    heads,
    stride_qt,
    stride_qh,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL: tl.constexpr,
    scale,
    COMPUTE: tl.constexpr,
    BY_ROW: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """The first BLOCK_D elements of queries, their other elements in TAIL columns, and the scale that logits still need.

    Row i is token `i // GROUP`, and `heads` has its head. Keys, values and weights follow the
    type of the queries: COMPUTE, or their own where it is None. For float16 they are multiplied with a power of
    two, which rounds nothing, such that no bfloat16 query is too large for it and none that matters too small.
    With BY_ROW each row has its own, and the scale has a number for each row. With TAIL 0 the second part repeats the first, and nothing reads it.
    Over a FORMAT with two elements in a byte, the parts are those of the low halves, and of the high ones.
    """
    PACKED: tl.constexpr = FORMAT[SHIFT] if FORMAT is not None else 0
    tokens = (first_token + rows // GROUP).to(tl.int64)
    places = query + tokens[:, None] * stride_qt + heads[:, None] * stride_qh
    inside = (rows < num_rows)[:, None]
    if PACKED:
        q = _query_part(places, inside, D // 2, BLOCK_D, FORMAT[STEP])
        tail = _query_part(places + PACKED, inside, D // 2, BLOCK_D, FORMAT[STEP])
    else:
        q = _query_part(places, inside, D, BLOCK_D, 1)
        tail = q
        if TAIL:
            tail = _query_part(places + BLOCK_D, inside, D - BLOCK_D, TAIL, 1)
    if COMPUTE is not None:
        if COMPUTE == tl.float16:
            q = q.to(tl.float32)
            tail = tail.to(tl.float32)
            largest = _largest(q)
            if TAIL or PACKED:
                largest = tl.maximum(largest, _largest(tail))
            if not BY_ROW:
                largest = tl.max(largest, 0)
            # A power of two rounds nothing, and 14 leaves room for the largest element below float16's 65504.
            shift = 14.0 - tl.floor(tl.log2(tl.maximum(largest, 1e-30)))
            q = q * (tl.exp2(shift)[:, None] if BY_ROW else tl.exp2(shift))
            tail = tail * (tl.exp2(shift)[:, None] if BY_ROW else tl.exp2(shift))
            scale = scale * tl.exp2(-shift)
        q = q.to(COMPUTE)
        tail = tail.to(COMPUTE)
    if BY_ROW:
        scale = scale + tl.zeros([rows.shape[0]], tl.float32)
    return q, tail, scale


@triton.jit
def _largest(x):
    """The largest finite element of each row: one that is infinite must not decide what others are multiplied with."""
    size = tl.abs(x)
    return tl.max(tl.where(size < float("inf"), size, 0.0), 1)


@triton.jit
def _query_part(places, inside, SIZE: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    """SIZE elements of each query, STEP from each to the next."""
    dims = tl.arange(0, WIDTH)[None, :]
    mask = inside
    if SIZE < WIDTH:
        mask = mask & (dims < SIZE)
    if STEP > 1:
        dims = dims * STEP
    return tl.load(places + dims, mask=mask, other=0.0)


@triton.jit
def pages_of(table_row, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The blocks `[BLOCK_N]` of the keys from `start` on; 0 from `end` on.

    Tiles start with a page where pages divide them: then places within pages are the same in every tile.
    """
    lanes = tl.arange(0, BLOCK_N)
    if BLOCK_N % BLOCK_SIZE == 0:
        return tl.load(
            table_row + start // BLOCK_SIZE + lanes // BLOCK_SIZE, mask=start + lanes < end, other=0
        )
    else:
        return tl.load(table_row + (start + lanes) // BLOCK_SIZE, mask=start + lanes < end, other=0)


@triton.jit
def rows_of(head, rows, dims, there, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values `[BLOCK_N, WIDTH]`: zeros past SIZE, and with MASKED where `there` says no."""
    places = head + rows[:, None] + dims[None, :]
    if MASKED:
        if SIZE < WIDTH:
            return tl.load(places, mask=there[:, None] & (dims < SIZE)[None, :], other=0.0)
        else:
            return tl.load(places, mask=there[:, None], other=0.0)
    else:
        if SIZE < WIDTH:
            return tl.load(places, mask=(dims < SIZE)[None, :], other=0.0)
        else:
            return tl.load(places)


@triton.jit
def halves_of(pairs, STORED: tl.constexpr, PTX: tl.constexpr):
    """The even and the odd elements, in float16, of floats of 8 bits that come as pairs in int16."""
    if PTX:
        # Two pairs at a time; Triton's own conversion takes every element apart first.
        if STORED == tl.float8e4nv:
            return tl.inline_asm_elementwise(
                E4M3_HALVES, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
        else:
            return tl.inline_asm_elementwise(
                E5M2_HALVES, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )
    else:
        even = pairs.to(tl.uint8).to(STORED, bitcast=True).to(tl.float16)
        odd = (pairs >> 8).to(tl.uint8).to(STORED, bitcast=True).to(tl.float16)
        return even, odd
