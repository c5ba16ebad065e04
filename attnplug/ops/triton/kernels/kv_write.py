"""Writing keys and values into their pages: a tile of (token, head) rows per program, K and V together.

8-bit floats from integer arithmetic, for GPUs without instructions for them and for the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode_8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, FNUZ: tl.constexpr):
    """The bits, uint8, of finite float32 `x` rounded to nearest even; NaN stays NaN.

    `x` must not exceed the type's largest number. FNUZ types have neither infinities nor -0, and
    their NaN is where -0 would be.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    sign = (bits >> 24) & 0x80
    odd = (magnitude >> SHIFT) & 1
    # Half of the last kept bit is added, less one if that bit is 0: ties then round to even.
    normal = (magnitude - ((127 - BIAS) << 23) + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT
    # Adding a float whose last bit equals the 8-bit type's last one rounds small numbers there.
    LAST: tl.constexpr = (127 - BIAS + SHIFT + 1) << 23
    last = tl.full(x.shape, LAST, tl.int32).to(tl.float32, bitcast=True)
    small = (magnitude.to(tl.float32, bitcast=True) + last).to(tl.int32, bitcast=True) - LAST
    code = tl.where(magnitude < ((128 - BIAS) << 23), small, normal)
    not_a_number = magnitude > 0x7F800000
    if FNUZ:
        code = tl.where(code == 0, 0, code | sign)
        code = tl.where(not_a_number, 0x80, code)
    else:
        code = tl.where(not_a_number, 0x7F, code) | sign
    return code.to(tl.uint8)


# The number of rows and the address of slots differ between steps, and must not compile another kernel.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slot_mapping"])
def kv_write_kernel(
    key,
    value,
    k_cache,
    v_cache,
    slot_mapping,
    num_rows,
    k_scale,
    v_scale,
    stride_kt,
    stride_kh,
    stride_kd,
    stride_vt,
    stride_vh,
    stride_vd,
    stride_slot,
    K_PAGES: tl.constexpr,
    V_PAGES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    TILE: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows `(token, head)` of K and V to the slots of their tokens; a negative slot is not written.

    K_PAGES and V_PAGES are the strides of a cache by block, token, head and dimension: they are fixed
    with the cache, so that the compiler may know them. TILE has the rows of a program, D and DV as powers
    of two. Scales are numbers, or pointers to one for each head. FORMAT is empty, or that of an 8-bit type: its largest number, and where the hardware does not
    convert the MANTISSA, BIAS and FNUZ of `encode_8_bits`.
    With PDL the next kernel may be launched while this one runs, and waits for it.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * TILE[0] + tl.arange(0, TILE[0])
    inside = rows < num_rows
    # int64, because offsets into large tensors and caches pass 32 bits.
    tokens = (rows // HEADS).to(tl.int64)
    heads = (rows % HEADS).to(tl.int64)
    dims = tl.arange(0, TILE[1]).to(tl.int64)[None, :]
    dims_v = tl.arange(0, TILE[2]).to(tl.int64)[None, :]
    # All loads before any store: they are independent, and the compiler cannot know that.
    slots = tl.load(slot_mapping + tokens * stride_slot, mask=inside, other=-1).to(tl.int64)
    from_k = (tokens * stride_kt + heads * stride_kh)[:, None] + dims * stride_kd
    from_v = (tokens * stride_vt + heads * stride_vh)[:, None] + dims_v * stride_vd
    k = tl.load(key + from_k, mask=inside[:, None] & (dims < D))
    v = tl.load(value + from_v, mask=inside[:, None] & (dims_v < DV))
    written = (slots >= 0)[:, None]
    blocks = slots // BLOCK_SIZE
    places = slots % BLOCK_SIZE
    to_k = (blocks * K_PAGES[0] + places * K_PAGES[1] + heads * K_PAGES[2])[:, None] + dims * K_PAGES[3]
    to_v = (blocks * V_PAGES[0] + places * V_PAGES[1] + heads * V_PAGES[2])[:, None] + dims_v * V_PAGES[3]
    # The interpreter passes numbers as those of Python, which have no dtype.
    if isinstance(k_scale, tl.tensor) and k_scale.dtype.is_ptr():
        k_scale = tl.load(k_scale + heads)[:, None]
    if isinstance(v_scale, tl.tensor) and v_scale.dtype.is_ptr():
        v_scale = tl.load(v_scale + heads)[:, None]
    k = _stored(k, k_scale, k_cache.dtype.element_ty, FORMAT)
    v = _stored(v, v_scale, v_cache.dtype.element_ty, FORMAT)
    tl.store(k_cache + to_k, k, mask=written & (dims < D))
    tl.store(v_cache + to_v, v, mask=written & (dims_v < DV))


@triton.jit
def _stored(x, scale, dtype: tl.constexpr, FORMAT: tl.constexpr):
    if len(FORMAT) == 0:
        stored = x.to(dtype)
    else:
        # Exact division: with a product by 1 / scale the bytes would not be those that torch writes.
        x = tl.div_rn(x.to(tl.float32), tl.full(x.shape, 1.0, tl.float32) * scale)
        x = tl.clamp(x, -FORMAT[0], FORMAT[0], propagate_nan=tl.PropagateNan.ALL)
        stored = x.to(dtype) if len(FORMAT) == 1 else encode_8_bits(x, FORMAT[1], FORMAT[2], FORMAT[3])
    return stored
