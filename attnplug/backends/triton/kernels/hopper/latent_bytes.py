"""Products with latents of 8 bits, which become float16 in registers: in shared memory they are read as they are stored.

A warp group's products take each operand in fixed places. Any element of a latent may have any place, if the other
operand or the output has the same order. So each thread loads words of four elements.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

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
def _keys(buffer, LOGITS: gl.constexpr):
    """Elements of keys `[BLOCK_N, S]` as the first operand; of 16 in a row, thread t of four has 4t to 4t + 3.

    `in_places` gives queries the same order.
    """
    ROWS: gl.constexpr = buffer.shape[0]
    SIZE: gl.constexpr = buffer.shape[1]
    REGISTERS: gl.constexpr = [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]]
    BITS: gl.constexpr = 3 + (SIZE > 16) + (SIZE > 32) + (SIZE > 64)
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        REGISTERS[:BITS], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [ROWS, SIZE]
    )
    convert: gl.constexpr = E4M3_TO_HALF if buffer.dtype == gl.float8e4nv else E5M2_TO_HALF
    halves = gl.inline_asm_elementwise(
        convert, "=r,=r,r", [buffer.load(WORDS)], dtype=gl.float16, is_pure=True, pack=4
    )
    halves = halves.reshape([ROWS, SIZE // 16, 4, 2, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, SIZE])
    return gl.convert_layout(halves, gl.DotOperandLayout(0, LOGITS, 2))


@gluon.jit
def in_places(queries):
    """Elements `[BLOCK_M, S]` in the order of those of `_keys`."""
    ROWS: gl.constexpr = queries.shape[0]
    SIZE: gl.constexpr = queries.shape[1]
    return queries.reshape([ROWS, SIZE // 16, 4, 2, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, SIZE])


@gluon.jit
def _values(buffer, LOGITS: gl.constexpr):
    """SPAN elements of keys `[BLOCK_N, SPAN]` as the first operand `[SPAN, BLOCK_N]`; `elements` undoes its order."""
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
def byte_logits(queries, latents, logits, use_acc, LOGITS: gl.constexpr):
    """Begin to add products of latents `[BLOCK_N, S]` with queries `[BLOCK_M, S]`, which are `in_places`."""
    SIZE: gl.constexpr = latents.shape[1]
    # The operands of two products in flight are registers: fewer columns leave more of them.
    STEP: gl.constexpr = min(SIZE, 64 if logits.shape[1] == 16 else 2048 // logits.shape[1])
    for first in gl.static_range(0, SIZE, STEP):
        keys = _keys(latents.slice(first, STEP, dim=1), LOGITS)
        columns = queries.slice(first, STEP, dim=1).permute((1, 0))
        logits = warpgroup_mma(keys, columns, logits, use_acc=use_acc or first > 0, is_async=True)
        logits = warpgroup_mma_wait(1, deps=(logits,))
    return logits


@gluon.jit
def byte_values(latents, weights, sums, LOGITS: gl.constexpr):
    """Begin to add SPAN elements of latents `[BLOCK_N, SPAN]` with weights `[BLOCK_N, BLOCK_M]`; see `elements`."""
    KEYS: gl.constexpr = latents.shape[0]
    STEP: gl.constexpr = min(KEYS, 32)
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
