"""8-bit floats from integer arithmetic, for GPUs without instructions for them and for the interpreter."""

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
