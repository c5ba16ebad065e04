"""Writing keys and values into pages with planes: a tile of (token, head) rows per program, K and V together."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug.ops.triton.kernels.kv_write import encode_8_bits
from attnplug.ops.triton.kernels.rotation import sum_in_order, turned_whole

# The sum of it and a float32 below 2**22 is rounded to a whole number, ties to even.
_WHOLE = tl.constexpr(12582912.0)
_STEP = tl.constexpr(0.3352)


# The number of rows and the address of slots differ between steps, and must not compile another kernel.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slot_mapping"])
def format_write_kernel(
    key,
    value,
    k_cache,
    v_cache,
    slot_mapping,
    matrix,
    num_rows,
    k_scale,
    v_scale,
    factor,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vt,
    stride_vh,
    stride_vd,
    stride_slot,
    stride_kb,
    stride_vb,
    DATA: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_ORDER: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    """TILE rows of K, or on the grid's second place of V, to the slots of their tokens; a negative slot is not written.

    DATA has the bytes from token to token and from head to head, and SCALES those of the plane of scales, after the bytes
    from the page's first one, and whether a scale's address is a multiple of its size.
    PDL is that of kv_write_kernel.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if tl.program_id(1) == 0:
        _write_rows(
            key, k_cache, slot_mapping, matrix, num_rows, k_scale, factor,
            stride_kt, stride_kh, stride_kd, stride_slot, stride_kb,
            DATA, SCALES, BLOCK_SIZE, HEADS, D, BLOCK_D, TILE, PARTS, BLOCK, IN_ORDER, FORMAT,
        )  # fmt: skip
    else:
        _write_rows(
            value, v_cache, slot_mapping, matrix, num_rows, v_scale, factor,
            stride_vt, stride_vh, stride_vd, stride_slot, stride_vb,
            DATA, SCALES, BLOCK_SIZE, HEADS, D, BLOCK_D, TILE, PARTS, BLOCK, IN_ORDER, FORMAT,
        )  # fmt: skip


@triton.jit
def _write_rows(
    source,
    pages,
    slot_mapping,
    matrix,
    num_rows,
    scale,
    factor,
    stride_t,
    stride_h,
    stride_d,
    stride_slot,
    stride_block,
    DATA: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_ORDER: tl.constexpr,
    FORMAT: tl.constexpr,
):
    rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = rows < num_rows
    # int64, because offsets into large tensors and caches pass 32 bits.
    tokens = (rows // HEADS).to(tl.int64)
    heads = (rows % HEADS).to(tl.int64)
    slots = tl.load(slot_mapping + tokens * stride_slot, mask=inside, other=-1).to(tl.int64)
    written = slots >= 0
    page = slots // BLOCK_SIZE * stride_block
    place = slots % BLOCK_SIZE
    data = pages + (page + place * DATA[0] + heads * DATA[1])
    scales = pages + (page + SCALES[0] + place * SCALES[1] + heads * SCALES[2])
    dims = tl.arange(0, BLOCK_D)[None, :].to(tl.int64)
    from_source = (tokens * stride_t + heads * stride_h)[:, None] + dims * stride_d
    x = tl.load(source + from_source, mask=inside[:, None] & (dims < D), other=0.0).to(tl.float32)
    if FORMAT == "int8_token_head":
        codes, own = _int8(x)
        tl.store(data[:, None] + dims, codes, mask=written[:, None] & (dims < D))
        _store_scales(scales, own, written, SCALES[3])
    elif FORMAT == "nvfp4":
        codes, stored = _nvfp4(x, scale, TILE, BLOCK_D)
        pairs = tl.arange(0, BLOCK_D // 2)[None, :]
        tl.store(data[:, None] + pairs, codes, mask=written[:, None] & (pairs < D // 2))
        groups = tl.arange(0, BLOCK_D // 16)[None, :]
        tl.store(scales[:, None] + groups, stored, mask=written[:, None] & (groups < D // 16))
    else:
        codes, own = _rotated4(x, matrix, factor, D, BLOCK_D, PARTS, BLOCK, IN_ORDER)
        pairs = tl.arange(0, BLOCK_D // 2)[None, :]
        if BLOCK_D == D:
            low, high = tl.split(codes.reshape(TILE, 2, BLOCK_D // 2).permute(0, 2, 1))
        else:
            # Half of a head is no power of two, so the codes of both halves are gathered.
            places = tl.broadcast_to(tl.minimum(pairs, D // 2 - 1), [TILE, BLOCK_D // 2])
            low = tl.gather(codes, places, 1)
            high = tl.gather(codes, places + D // 2, 1)
        mask = written[:, None] & (pairs < D // 2)
        tl.store(data[:, None] + pairs, (low + high * 16).to(tl.uint8), mask=mask)
        _store_scales(scales, own, written, SCALES[3])


@triton.jit
def _int8(x):
    """Integers as bytes `[R, D]`, and scales `[R]`: those of `attnplug.ops.kv_codecs.Int8TokenHeadCodec`."""
    x = _clamped(x, 1.7014118346046923e38)
    own = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), tl.full([x.shape[0]], 127.0, tl.float32)), 2.0**-120)
    own = tl.where(_has_nan(x), float("nan"), own)
    codes = _rounded(tl.div_rn(x, tl.broadcast_to(own[:, None], x.shape)))
    codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
    return (_number(codes).to(tl.int32) & 0xFF).to(tl.uint8), own


@triton.jit
def _nvfp4(x, scale, R: tl.constexpr, D: tl.constexpr):
    """Two codes in a byte `[R, D / 2]`, and E4M3 scales of blocks `[R, D / 16]`: those of `NVFP4Codec`."""
    G: tl.constexpr = D // 16
    # The quotient stays finite: what is beyond the scales' range has the last code anyway.
    x = _clamped(x, tl.minimum(scale, 1.0) * 3.4e38)
    x = tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * scale)
    even, odd = tl.split(x.reshape(R, G, 8, 2))
    largest = tl.maximum(tl.max(tl.abs(even), 2), tl.max(tl.abs(odd), 2))
    stored = tl.div_rn(largest, tl.full([R, G], 6.0, tl.float32))
    stored = tl.minimum(tl.maximum(stored, 2.0**-9), 448.0)
    no_number = tl.sum((even != even).to(tl.int32) + (odd != odd).to(tl.int32), 2) > 0
    bits = tl.where(no_number, 0xFF, encode_8_bits(stored, 3, 7, False))
    # E4M3 moved by 7 bits is float16, times 2**-8.
    wide = (bits.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    wide = tl.broadcast_to(wide[:, :, None], [R, G, 8])
    low = _e2m1(tl.div_rn(even, wide))
    high = _e2m1(tl.div_rn(odd, wide))
    return (low + high * 16).to(tl.uint8).reshape(R, D // 2), bits.to(tl.uint8)


@triton.jit
def _e2m1(x):
    """The codes of the nearest levels; a tie goes to the even code, and NaN to the last one."""
    size = tl.abs(x)
    code = (
        (not_within(size, 0.25) + not_within(size, 1.25))
        + (not_within(size, 2.5) + not_within(size, 5.0))
        + (not_below(size, 0.75) + not_below(size, 1.75) + not_below(size, 3.5))
    )
    return code + ((x.to(tl.int32, bitcast=True) >> 31) & 8)


@triton.jit
def not_within(size, middle):
    """1 above a middle, and for NaN."""
    return tl.where(size <= middle, 0, 1)


@triton.jit
def not_below(size, middle):
    """1 at a middle and above, and for NaN."""
    return tl.where(size < middle, 0, 1)


@triton.jit
def _rotated4(
    x,
    matrix,
    factor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    """Codes `[R, BLOCK_D]` and float16 scales `[R]`: IN_ORDER those of `Rotated4Codec`, else from sums in another order.

    Rows of 16 bits are turned by tensor cores: one scale in 10,000 is then the next float16, and one code in a million.
    """
    # The sum of 256 squares is below the largest float32.
    x = _clamped(x, 5.764607523034235e17)
    y = turned_whole(x, matrix, BLOCK_D, factor, BLOCK_D, BLOCK, PARTS, IN_ORDER)
    squares = sum_in_order(y * y) if IN_ORDER else tl.sum(y * y, 1)
    rms = tl.sqrt_rn(tl.div_rn(squares, tl.full(squares.shape, 1.0, tl.float32) * D))
    step = (tl.maximum(rms, 2.0**-24) * _STEP)[:, None]
    steps = _rounded(tl.div_rn(y, tl.broadcast_to(step, y.shape)) + 7.5)
    steps = tl.minimum(tl.maximum(steps, 0.0), 15.0)
    products = sum_in_order(y * (steps - 7.5)) if IN_ORDER else tl.sum(y * (steps - 7.5), 1)
    none = products == 0.0
    own = tl.where(none, 0.0, tl.div_rn(squares, tl.where(none, 1.0, products)))
    return _number(steps).to(tl.int32), tl.where(own > 65504.0, 65504.0, own).to(tl.float16)


@triton.jit
def _clamped(x, limit):
    """Numbers beyond the limit become it, and NaN stays."""
    return tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _number(x):
    """0 in place of NaN, which is no integer."""
    return tl.where(x == x, x, 0.0)


@triton.jit
def _has_nan(x):
    return tl.sum((x != x).to(tl.int32), 1) > 0


@triton.jit
def _rounded(x):
    """The nearest whole numbers, ties to even, of numbers below 2**22."""
    return (x + _WHOLE) - _WHOLE


@triton.jit
def _store_scales(places, scales, mask, ALIGNED: tl.constexpr):
    """One scale for each place, as single bytes where addresses are no multiples of its size."""
    SIZE: tl.constexpr = scales.dtype.primitive_bitwidth // 8
    if ALIGNED:
        tl.store(places.to(tl.pointer_type(scales.dtype), bitcast=True), scales, mask=mask)
    else:
        bits = scales.to(tl.int32 if SIZE == 4 else tl.int16, bitcast=True).to(tl.int32)
        for at in tl.static_range(SIZE):
            tl.store(places + at, ((bits >> (8 * at)) & 0xFF).to(tl.uint8), mask=mask)
