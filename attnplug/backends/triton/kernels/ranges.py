"""The keys that a tile of queries sees."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_range(
    first_pos,
    last_pos,
    first_key,
    seq_len,
    left,
    right,
    chunk,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
):
    """`[lo, hi)`: the keys that some query at `first_pos .. last_pos` sees."""
    lo = first_key
    hi = seq_len
    if HAS_LEFT:
        lo = tl.maximum(lo, first_pos - left)
    if HAS_RIGHT:
        hi = tl.minimum(hi, last_pos + right + 1)
    if HAS_CHUNK:
        lo = tl.maximum(lo, tl.maximum(first_pos, 0) // chunk * chunk)
        hi = tl.minimum(hi, tl.where(last_pos < 0, lo, (tl.maximum(last_pos, 0) // chunk + 1) * chunk))
    return lo, hi


@triton.jit
def common_range(
    first_pos,
    last_pos,
    lo,
    hi,
    left,
    right,
    chunk,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
):
    """`[lo, hi)`: the keys of a range that every query at `first_pos .. last_pos` sees."""
    if HAS_LEFT:
        lo = tl.maximum(lo, last_pos - left)
    if HAS_RIGHT:
        hi = tl.minimum(hi, first_pos + right + 1)
    if HAS_CHUNK:
        lo = tl.maximum(lo, tl.maximum(last_pos, 0) // chunk * chunk)
        hi = tl.minimum(hi, tl.where(first_pos < 0, lo, (tl.maximum(first_pos, 0) // chunk + 1) * chunk))
    return lo, hi
