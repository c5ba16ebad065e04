"""vLLM's caches and attnplug's logical order (blocks, 2, tokens, heads, size), without a copy."""

from __future__ import annotations

import torch
from vllm.v1.attention.backend import AttentionBackend

from attnplug.core.dtypes import is_quantized_kv_cache
from attnplug.ops.storage import STORAGE_DTYPES

HAS_CACHE_SHAPE = hasattr(AttentionBackend, "get_kv_cache_shape")
"""Whether backends give the shape of caches (up to vLLM 0.28), or get views [blocks, heads, tokens, 2 * size]."""


def logical(kv_cache: torch.Tensor, head_size: int, kv_cache_dtype: str) -> torch.Tensor:
    """`kv_cache` as attnplug's backends read it, in its stored dtype."""
    if kv_cache.ndim == 4:
        kv_cache = kv_cache.view(*kv_cache.shape[:-1], 2, head_size).permute(0, 3, 2, 1, 4)
    # vLLM's pages of 16 bits come in their dtype, and "auto" is no type of its own.
    stored = STORAGE_DTYPES.get(kv_cache_dtype) if is_quantized_kv_cache(kv_cache_dtype) else None
    return kv_cache if stored is None or kv_cache.dtype == stored else kv_cache.view(stored)
