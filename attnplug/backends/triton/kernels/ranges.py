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
def load_spans(mm_spans, tokens):
    """The multimodal spans `[start, stop)` of tokens; for text a start after all keys and a stop before them."""
    start = tl.load(mm_spans + tokens * 2)
    stop = tl.load(mm_spans + tokens * 2 + 1)
    inside = stop > start
    return tl.where(inside, start, 2147483647), tl.where(inside, stop, 0)


@triton.jit
def common_range(
    first_pos,
    last_pos,
    lo,
    hi,
    first_stop,
    last_start,
    left,
    right,
    chunk,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SPANS: tl.constexpr,
):
    """`[lo, hi)`: the keys of a range that every query at `first_pos .. last_pos` sees.

    Neither end of the keys that a query sees decreases from query to query, with spans too. So the spans of the
    first query and the last one, which end at `first_stop` and begin at `last_start`, suffice.
    """
    floor = lo
    limit = hi
    if HAS_LEFT:
        lo = tl.maximum(lo, last_pos - left)
    if HAS_RIGHT:
        hi = tl.minimum(hi, first_pos + right + 1)
    if HAS_CHUNK:
        lo = tl.maximum(lo, tl.maximum(last_pos, 0) // chunk * chunk)
        hi = tl.minimum(hi, tl.where(first_pos < 0, lo, (tl.maximum(first_pos, 0) // chunk + 1) * chunk))
    if HAS_SPANS:
        lo = tl.maximum(floor, tl.minimum(lo, last_start))
        hi = tl.minimum(limit, tl.maximum(hi, first_stop))
    return lo, hi
