"""Where a request may have null blocks: only in front of the keys that its next query attends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attnplug.core.kv_cache_spec import ChunkedLocalAttentionSpec, KVCacheSpec, SlidingWindowSpec

_Ints = npt.NDArray[np.int64]


def first_attended(spec: KVCacheSpec, computed: _Ints) -> _Ints:
    """The first key that requests of `computed` tokens attend next, int64 `[R]`; blocks in front may be null."""
    if isinstance(spec, SlidingWindowSpec):
        return np.maximum(computed - spec.sliding_window + 1, 0)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return computed // spec.chunk * spec.chunk
    return np.zeros_like(computed)


def reach(spec: KVCacheSpec) -> str:
    """The facts of a KV group that decide which of its blocks a request keeps, as text."""
    if isinstance(spec, SlidingWindowSpec):
        return f"SlidingWindowSpec(sliding_window={spec.sliding_window})"
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return f"ChunkedLocalAttentionSpec(chunk={spec.chunk})"
    return type(spec).__name__
