"""Products with latents of 8 bits, which shared memory holds as they are stored.

Keys are multiplied as they are, with queries in two parts of 8 bits. Values become float16 in registers: a warp group's
products take each operand in fixed places, but any element may have any place if the output has the same order. So each
thread loads words of four elements.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

SPAN = gl.constexpr(128)
"""Elements of latents in one product."""

# Four elements become two pairs, exactly, in a quarter of the instructions that bfloat16 takes.
_TO_HALF = """{{
.reg .b16 first, second;
mov.b32 {{first, second}}, $2;
cvt.rn.f16x2.{stored}x2 $0, first;
cvt.rn.f16x2.{stored}x2 $1, second;
}}"""
E4M3_TO_HALF = gl.constexpr(_TO_HALF.format(stored="e4m3"))
E5M2_TO_HALF = gl.constexpr(_TO_HALF.format(stored="e5m2"))

# Four elements of one key and of another become four pairs, one of each.
_PAIRED = """{{
.reg .b16 first, second, third, fourth;
.reg .b32 low, high;
prmt.b32 low, $4, $5, 0x5140;
prmt.b32 high, $4, $5, 0x7362;
mov.b32 {{first, second}}, low;
mov.b32 {{third, fourth}}, high;
cvt.rn.f16x2.{stored}x2 $0, first;
cvt.rn.f16x2.{stored}x2 $1, second;
cvt.rn.f16x2.{stored}x2 $2, third;
cvt.rn.f16x2.{stored}x2 $3, fourth;
}}"""
E4M3_PAIRED = gl.constexpr(_PAIRED.format(stored="e4m3"))
E5M2_PAIRED = gl.constexpr(_PAIRED.format(stored="e5m2"))


@gluon.jit
def _in_parts(buffer, factor, LAYOUT: gl.constexpr):
    """Rows of `buffer` times `factor` as sums of two elements of 8 bits, in its place: all first ones, all second ones."""
    ROWS: gl.constexpr = buffer.shape[0]
    SIZE: gl.constexpr = buffer.shape[1]
    values = buffer.load(LAYOUT).to(gl.float32) * factor[:, None]
    # Rounded to four bits here: ptxas 12.8 unpacks elements of 8 bits before it has packed them.
    first = ((values.to(gl.int32, bitcast=True) + 0x80000) & -0x100000).to(gl.float32, bitcast=True)
    both = gl.join(first.to(gl.float8e4nv), (values - first).to(gl.float8e4nv))
    PARTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * ROWS, SIZE], gl.float8e4nv)
    parts = buffer._reinterpret(gl.float8e4nv, [2 * ROWS, SIZE], PARTS)
    parts.store(both.permute((2, 0, 1)).reshape([2 * ROWS, SIZE]))
    return parts


@gluon.jit
def queries_in_parts(low, high, rope, ROPE: gl.constexpr):
    """Queries in bfloat16 as two parts of 8 bits, in place, and what the products of each row are multiplied with.

    Eight bits of a significand are twice four, so nothing is rounded but elements below 2**-9 of a row's largest; these
    lose what is below 2**-16 of it.
    """
    # 448 is the largest number of 8 bits.
    return scaled(low, high, rope, 7, _in_parts, ROPE)


@gluon.jit
def scaled(low, high, rope, EXPONENT: gl.constexpr, WRITE: gl.constexpr, ROPE: gl.constexpr):
    """Queries as WRITE gives them, and by row the inverse of the power of two that they are multiplied with.

    It makes the largest value of a row 2**EXPONENT to twice that. WRITE takes a buffer, factors and a layout.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    largest = gl.full([low.shape[0]], 1e-30, gl.float32, gl.SliceLayout(1, LAYOUT))
    largest = _largest(high, _largest(low, largest, LAYOUT), LAYOUT)
    if ROPE:
        largest = _largest(rope, largest, LAYOUT)
    shift = EXPONENT - gl.floor(gl.log2(largest))
    factor, inverse = gl.exp2(shift), gl.exp2(-shift)
    low = WRITE(low, factor, LAYOUT)
    high = WRITE(high, factor, LAYOUT)
    if ROPE:
        rope = WRITE(rope, factor, LAYOUT)
    else:
        rope = low
    fence_async_shared()
    return low, high, rope, inverse


@gluon.jit
def _largest(buffer, largest, LAYOUT: gl.constexpr):
    """`largest`, or by row the largest size of a value in `buffer`."""
    COUNT: gl.constexpr = buffer.shape[1]
    SIDE: gl.constexpr = min(COUNT, 64)
    for first in gl.static_range(0, COUNT, SIDE):
        part = buffer.slice(first, SIDE, dim=1).load(LAYOUT).to(gl.float32)
        largest = gl.maximum(largest, gl.max(gl.abs(part), 1))
    return largest


@gluon.jit
def sum_of_parts(logits, LOGITS: gl.constexpr):
    """Products `[BLOCK_N, BLOCK_M]` from those of both parts of the queries."""
    ROWS: gl.constexpr = logits.shape[0]
    COUNT: gl.constexpr = logits.shape[1] // 2
    return gl.convert_layout(gl.sum(logits.reshape([ROWS, 2, COUNT]), 1), LOGITS)


@gluon.jit
def _values(buffer, LOGITS: gl.constexpr):
    """SPAN elements of keys `[BLOCK_N, SPAN]` as the first operand `[SPAN, BLOCK_N]`; `write_values` undoes its order."""
    KEYS: gl.constexpr = buffer.shape[0]
    REGISTERS: gl.constexpr = [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [32, 0]]
    BITS: gl.constexpr = 4 + (KEYS > 16) + (KEYS > 32)
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        REGISTERS[:BITS],
        [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        [[0, 32], [0, 64]],
        [],
        [KEYS, SPAN],
    )
    even, odd = gl.split(buffer.load(WORDS).reshape([KEYS // 2, 2, SPAN]).permute((0, 2, 1)))
    convert: gl.constexpr = E4M3_PAIRED if buffer.dtype == gl.float8e4nv else E5M2_PAIRED
    one, other = gl.inline_asm_elementwise(
        convert, "=r,=r,=r,=r,r,r", [even, odd], dtype=(gl.float16, gl.float16), is_pure=True, pack=4
    )
    # Pairs of keys, warps, threads, an element of two, a key of two, two elements of four.
    halves = gl.join(one, other).reshape([KEYS // 2, 4, 8, 2, 2, 2])
    halves = halves.permute((5, 1, 3, 2, 0, 4)).reshape([SPAN, KEYS])
    return gl.convert_layout(halves, gl.DotOperandLayout(0, LOGITS, 2))


@gluon.jit
def byte_values(latents, weights, sums, LOGITS: gl.constexpr):
    """Begin to add SPAN elements of latents `[BLOCK_N, SPAN]` with weights `[BLOCK_N, BLOCK_M]`; see `write_values`."""
    KEYS: gl.constexpr = latents.shape[0]
    STEP: gl.constexpr = min(KEYS, 1024 // weights.shape[1])
    for first in gl.static_range(0, KEYS, STEP):
        values = _values(latents.slice(first, STEP, dim=0), LOGITS)
        sums = warpgroup_mma(values, weights.slice(first, STEP, dim=0), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=(sums,))
    return sums


@gluon.jit
def write_values(values, rows, there, FIRST: gl.constexpr):
    """Write sums of `byte_values` to the elements from FIRST on of rows that begin at `rows`."""
    COUNT: gl.constexpr = values.shape[1]
    PLACES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0]][: 4 + (COUNT > 16)],
        [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]],
        [[0, 32], [0, 64]],
        [],
        [COUNT, SPAN],
    )
    values = values.reshape([2, 4, 2, 8, COUNT]).permute((4, 1, 3, 0, 2)).reshape([COUNT, SPAN])
    rows = gl.convert_layout(rows, gl.SliceLayout(1, PLACES))[:, None]
    there = gl.convert_layout(there, gl.SliceLayout(1, PLACES))[:, None]
    dims = FIRST + gl.arange(0, SPAN, layout=gl.SliceLayout(0, PLACES))[None, :]
    gl.store(rows + dims, gl.convert_layout(values, PLACES), mask=there)
