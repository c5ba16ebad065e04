"""Rows of queries and outputs of prefill over float16 numbers: their powers of two, and the rotation of a format."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def as_float16(rows, tail, TAIL: gl.constexpr, LAYOUT: gl.constexpr, TAIL_LAYOUT: gl.constexpr):
    """Make both parts of rows of bfloat16 float16, in place and times a power of two for each; what they need as factors."""
    largest = _largest(rows, LAYOUT)
    if TAIL:
        more = _largest(tail, TAIL_LAYOUT)
        largest = gl.maximum(largest, gl.convert_layout(more, gl.SliceLayout(1, LAYOUT)))
    # The largest element is from 32 to 63, so that a sum of 256 fits. Float16 has all bits of those down to 2**-20 of it.
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 32)
    factor = ((259 - exponent) << 23).to(gl.int32).to(gl.float32, bitcast=True)
    _narrow(rows, factor, LAYOUT)
    if TAIL:
        _narrow(tail, gl.convert_layout(factor, gl.SliceLayout(1, TAIL_LAYOUT)), TAIL_LAYOUT)
    # Products read shared memory past what orders threads.
    fence_async_shared()
    return ((exponent - 5) << 23).to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def _largest(rows, LAYOUT: gl.constexpr):
    """The largest size of an element of each row."""
    ROWS: gl.constexpr = rows.shape[0]
    COUNT: gl.constexpr = rows.shape[1]
    SIDE: gl.constexpr = min(COUNT, 64)
    largest = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
    for first in gl.static_range(0, COUNT, SIDE):
        part = gl.abs(rows.slice(first, SIDE, dim=1).load(LAYOUT).to(gl.float32))
        largest = gl.maximum(largest, gl.max(part, 1))
    return largest


@gluon.jit
def _narrow(rows, factor, LAYOUT: gl.constexpr):
    """Write rows times their factors as float16, in place."""
    COUNT: gl.constexpr = rows.shape[1]
    SIDE: gl.constexpr = min(COUNT, 64)
    target = rows._reinterpret(gl.float16, rows.shape, rows.type.layout)
    for first in gl.static_range(0, COUNT, SIDE):
        part = rows.slice(first, SIDE, dim=1).load(LAYOUT).to(gl.float32) * factor[:, None]
        target.slice(first, SIDE, dim=1).store(part.to(gl.float16))


@gluon.jit
def turned(rows, matrix, HALF: gl.constexpr, BLOCK_D: gl.constexpr, OUT: gl.constexpr):
    """The product of rows `[HALF, BLOCK_D]` with a matrix in shared memory."""
    zeros = gl.zeros([HALF, BLOCK_D], gl.float32, OUT)
    found = warpgroup_mma(rows, matrix, zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(found,))


@gluon.jit
def shared_matrix(places, dtype: gl.constexpr, SIDE: gl.constexpr):
    """A matrix `[SIDE, SIDE]` in shared memory, as `dtype`, for all groups of warps."""
    TARGET: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIDE, SIDE], dtype)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    target = gl.allocate_shared_memory(dtype, [SIDE, SIDE], TARGET)
    rows = gl.arange(0, SIDE, layout=gl.SliceLayout(1, LAYOUT))[:, None] * SIDE
    columns = gl.arange(0, SIDE, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    target.store(gl.load(places + (rows + columns)).to(dtype))
    fence_async_shared()
    return target
