"""Weights of the prefill kernel with specialised warps, as its products read them, and the sums of their rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnplug.backends.triton.kernels.scan import LOG2E, tanh

WEIGHT_LOG: gl.constexpr = gl.constexpr(15.0)
"""Weights in float16 are 2**15 times as large: numbers of some keys are far larger than those of keys of more weight."""


@gluon.jit
def _tanh(x, slope):
    """The hyperbolic tangent of `x * slope`, to 1e-7 of 1: two instructions of the unit that has a quarter of the rate."""
    above = gl.exp2(x * (slope * 2.0 * LOG2E)) + 1.0
    halves = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [above], dtype=gl.float32, is_pure=True, pack=1
    )
    return gl.fma(halves, -2.0, 1.0)


@gluon.jit
def weigh(
    logits,
    top,
    sums,
    unit,
    slope,
    begin,
    full_lo,
    full_hi,
    positions,
    lanes,
    lo,
    hi,
    left,
    right,
    chunk,
    BLOCK_N: gl.constexpr,
    SUMS: gl.constexpr,
    PARTS: gl.constexpr,
    LAYOUT: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    HAS_CHUNK: gl.constexpr,
    HAS_CAP: gl.constexpr,
    FIXED: gl.constexpr,
    NUMBERS: gl.constexpr,
):
    """Weights of a tile, the maximum (base 2), sums, and what was summed before is multiplied with."""
    ROWS: gl.constexpr = logits.shape[0]
    if HAS_CAP:
        # Decodes round as `tanh` does.
        logits = tanh(logits * slope) if FIXED else _tanh(logits, slope)
    if (begin < full_lo) | (begin + BLOCK_N > full_hi):
        keys = (begin + lanes)[None, :]
        seen = (keys >= lo) & (keys < hi)
        at = positions[:, None]
        if HAS_LEFT:
            seen = seen & (keys >= at - left)
        if HAS_RIGHT:
            seen = seen & (keys <= at + right)
        if HAS_CHUNK:
            inside = gl.maximum(at, 0)
            seen = seen & (keys // chunk == inside // chunk) & (at >= 0)
        logits = gl.where(seen, logits, float("-inf"))
    # Threads have two maxima for each row, so that one comparison need not wait for the one before.
    highest = gl.max(gl.max(logits.reshape([ROWS, BLOCK_N // 8, 8]), 1), 1)
    new_top = gl.maximum(top, gl.convert_layout(highest, LAYOUT) * unit)
    pivot = gl.where(new_top == float("-inf"), 0.0, new_top)
    if NUMBERS:
        # Each row has a unit of its own.
        weights = gl.exp2(gl.fma(logits, unit[:, None], WEIGHT_LOG - pivot[:, None]))
    else:
        weights = gl.exp2(gl.fma(logits, unit, -pivot[:, None]))
    fade = gl.exp2(top - pivot)
    parts = gl.sum(weights.reshape([ROWS, BLOCK_N // SUMS, SUMS]), 1)
    fades = gl.convert_layout(fade, gl.SliceLayout(1, PARTS))[:, None]
    sums = gl.fma(sums, fades, gl.convert_layout(parts, PARTS))
    return weights, new_top, sums, fade


@gluon.jit
def row_sums(sums, ROWS: gl.constexpr):
    """The sum of each row, as in_one_order; four threads have two columns each of every eight."""
    low, high = gl.split(sums.reshape([sums.shape[0], sums.shape[1] // 2, 2]))
    sums = low + high
    sums += _of_lane(sums, 1)
    sums += _of_lane(sums, 2)
    # All columns of an eight have its sum now.
    for _ in gl.static_range(3):
        if sums.shape[1] > 4:
            low, high = gl.split(gl.permute(sums.reshape([sums.shape[0], 2, sums.shape[1] // 2]), (0, 2, 1)))
            sums = low + high
    return gl.convert_layout(gl.max(sums, 1), ROWS)


@gluon.jit
def _of_lane(values, DISTANCE: gl.constexpr):
    """What the thread DISTANCE lanes away has of `values`."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;",
        "=r,r,n",
        [values, DISTANCE],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def fold(held, more, before, after, LAYOUT: gl.constexpr):
    """What is held of the splits before, and that of one split more, with their factors."""
    ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    before = gl.convert_layout(before, ROWS)[:, None]
    return gl.fma(more, gl.convert_layout(after, ROWS)[:, None], held * before)


# Weights of 16 bits that a loop carries one by one are put together again in each step: 32 instructions of 450.
@gluon.jit
def paired(weights, dtype: gl.constexpr):
    """Weights `[R, N]` as pairs of 16 bits, int32 `[R, N / 2]`."""
    low, high = gl.split(weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        PAIR: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        PAIR: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(PAIR, "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def opened(pairs, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """The weights of pairs, one by one."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    both = gl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))
    return gl.convert_layout(both.reshape([both.shape[0], 2 * both.shape[1]]), LAYOUT)
