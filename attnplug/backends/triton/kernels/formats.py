"""Rows of formats with planes, opened as numbers to multiply: 8-bit integers, NVFP4 and rotated 4 bits.

FORMAT is None for pages with elements of a torch dtype. Else it has the name of the format, or "opened" for its codes in
float16; of the plane of scales the bytes (of opened pages the elements) from the page's first one, from token to token and
from head to head; whether a scale's address is a multiple of its size; whether a row has one scale, which its numbers are
multiplied with; and where the elements of a byte are: the step from one byte's low half to the next one's, and from a low
half to its high half. That is 0 for a byte with one element.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST_LOG = tl.constexpr(-60.0)
LEAST_SCALE = tl.constexpr(2.0**-60)
"""Scales of values below it count as it where maxima are compared, so that no sum of weights overflows."""
ROW_SCALES = tl.constexpr(5)
STEP = tl.constexpr(6)
SHIFT = tl.constexpr(7)
"""Places in FORMAT."""


@triton.jit
def head_planes(pages, head, stride_head, FORMAT: tl.constexpr):
    """Pointers to the first row of a head in both planes: of its data, and of its scales."""
    head = head.to(tl.int64)
    return pages + head * stride_head, pages + (FORMAT[1] + head * FORMAT[3])


@triton.jit
def columns_from(planes, first, FORMAT: tl.constexpr):
    """Pointers of `head_planes` to the bytes, and scales, of a row's columns from `first` on."""
    data, scales = planes
    data += first // 2 if FORMAT[SHIFT] else first
    # Each 16 elements of NVFP4 have a scale; rows of other formats have one.
    if FORMAT[0] == "nvfp4":
        scales += first // 16
    return data, scales


@triton.jit
def open_rows(
    planes,
    blocks,
    places,
    stride_block,
    stride_token,
    there,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Rows `[BLOCK_N, WIDTH]` in float16, twice for bytes of two elements.

    Numbers are exact. Those of NVFP4 come as 2**-9 of what they are; of the other formats, before their row's scale.
    """
    data, scales = planes
    rows = blocks * stride_block + places * stride_token
    SIZE: tl.constexpr = D // 2 if FORMAT[SHIFT] else D
    codes = _bytes(data, rows, there, SIZE, WIDTH, MASKED)
    if FORMAT[0] == "opened":
        return codes, codes
    codes = codes.to(tl.int16)
    if FORMAT[0] == "int8_token_head":
        # The bits of 1152 and the integer are those of 1024 and the byte with its sign turned.
        low = _half((codes ^ 0x80) | 0x6400) - 1152.0
        high = low
    elif FORMAT[0] == "nvfp4":
        # E4M3 moved by 7 bits is float16, times 2**-8; E2M1 moved by 9, times 2**-14. 2**9 is left to the caller.
        scale_rows = blocks * stride_block + places * FORMAT[2]
        of_block = _bytes(scales, scale_rows, there, D // 16, WIDTH // 8, MASKED).to(tl.int16)
        of_block = _half(of_block << 7) * 8192.0
        of_block = tl.broadcast_to(of_block[:, :, None], [codes.shape[0], WIDTH // 8, 8])
        of_block = tl.reshape(of_block, [codes.shape[0], WIDTH])
        low = _half(((codes & 7) << 9) | ((codes & 8) << 12)) * of_block
        high = _half(((codes & 0x70) << 5) | ((codes & 0x80) << 8)) * of_block
    else:
        # The bits of 512 and a code: the last one of its float16 is a half.
        low = _half(((codes & 15) << 1) | 0x6000) - 519.5
        high = _half(((codes >> 3) & 0x1E) | 0x6000) - 519.5
    return low, high


@triton.jit
def row_scales(planes, blocks, places, stride_block, there, MASKED: tl.constexpr, FORMAT: tl.constexpr):
    """The scale of each row `[BLOCK_N]`, in float32; with MASKED 0 for rows that are not `there`."""
    _, scales = planes
    rows = blocks * stride_block + places * FORMAT[2]
    if FORMAT[0] == "rotated4":
        return _scales(scales, rows, there, tl.float16, MASKED, FORMAT)
    else:
        return _scales(scales, rows, there, tl.float32, MASKED, FORMAT)


@triton.jit
def log_above(scales):
    """A power that makes 2 at least the scale and less than twice as large; a logarithm would take many instructions."""
    exponent = (scales.to(tl.int32, bitcast=True) >> 23) & 255
    return tl.maximum((exponent - 126).to(tl.float32), LEAST_LOG)


@triton.jit
def _half(bits):
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def _bytes(plane, rows, there, SIZE: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    items = tl.arange(0, WIDTH)[None, :]
    places = plane + (rows[:, None] + items)
    if MASKED:
        return tl.load(places, mask=there[:, None] & (items < SIZE), other=0)
    elif SIZE < WIDTH:
        return tl.load(places, mask=items < SIZE, other=0)
    else:
        return tl.load(places)


@triton.jit
def _scales(plane, rows, there, dtype: tl.constexpr, MASKED: tl.constexpr, FORMAT: tl.constexpr):
    """The scales of rows, in float32; of several bytes if their addresses are no multiples of their size."""
    mask = there if MASKED else None
    other = 0 if MASKED else None
    if FORMAT[4]:
        place = (plane + rows).to(tl.pointer_type(dtype), bitcast=True)
        found = tl.load(place, mask=mask, other=other)
    else:
        WORD: tl.constexpr = tl.int32 if dtype == tl.float32 else tl.int16
        bits = tl.load(plane + rows, mask=mask, other=other).to(WORD)
        for at in tl.static_range(1, dtype.primitive_bitwidth // 8):
            bits |= tl.load(plane + rows + at, mask=mask, other=other).to(WORD) << (8 * at)
        found = bits.to(dtype, bitcast=True)
    return found.to(tl.float32)


@triton.jit
def columns(WIDTH: tl.constexpr, DV: tl.constexpr, FORMAT: tl.constexpr):
    """The element of a value that each column of a result is, as `joined` gives it; DV where it is none."""
    if FORMAT[SHIFT] == 0:
        return tl.arange(0, WIDTH)
    elif FORMAT[SHIFT] == 1:
        return tl.arange(0, 2 * WIDTH)
    else:
        column = tl.arange(0, 2 * WIDTH)
        inner = column % WIDTH
        return tl.where(inner < DV // 2, column // WIDTH * FORMAT[SHIFT] + inner, DV)


@triton.jit
def joined(low, high, FORMAT: tl.constexpr):
    """One tile of the sums of low and of high halves."""
    if FORMAT[SHIFT] == 1:
        return tl.join(low, high).reshape(low.shape[0], 2 * low.shape[1])
    else:
        return tl.join(low, high).permute(0, 2, 1).reshape(low.shape[0], 2 * low.shape[1])


@triton.jit
def add_sinks(acc, more, top, total, sinks):
    """Sums after the sinks, logits in base 2, took their part of the softmax; -inf where there is none.

    Maxima over formats with row scales are not those of the logits, so a sink that came first could make all
    weights too small for float16.
    """
    new_top = tl.maximum(top, sinks)
    pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
    fade = tl.exp2(top - pivot)
    return acc * fade[:, None], more * fade[:, None], new_top, total * fade + tl.exp2(sinks - pivot)
