"""The element types of a layer: computed, and stored in its pages."""

from __future__ import annotations

import torch

from attnplug.core.errors import LayoutError
from attnplug.core.spec import LayerSpec
from attnplug.ops.storage import STORAGE_DTYPES

__all__ = ["compute_dtype", "storage_dtype", "typed_view"]

_STORED = ("float16", "bfloat16", "float32", "fp8_e4m3", "fp8_e5m2")


def compute_dtype(spec: LayerSpec) -> torch.dtype:
    """The torch dtype of the layer's queries, keys, values and outputs."""
    return STORAGE_DTYPES[spec.dtype]


def storage_dtype(spec: LayerSpec) -> torch.dtype:
    """The element type of the layer's cache; LayoutError for one that no built-in backend stores."""
    if spec.resolved_kv_cache_dtype not in _STORED:
        raise LayoutError("kv_cache_dtype", spec.kv_cache_dtype, f"must be one of {', '.join(_STORED)}")
    return STORAGE_DTYPES[spec.resolved_kv_cache_dtype]


def typed_view(kv_cache: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """The cache as its element type; a raw fp8 pool may come as uint8.

    Raises:
        LayoutError: a cache of another element type.
    """
    dtype = storage_dtype(spec)
    if kv_cache.dtype == dtype:
        return kv_cache
    if kv_cache.dtype == torch.uint8 and spec.has_quantized_kv_cache:
        return kv_cache.view(dtype)
    limit = f"must be {dtype}" + (" or torch.uint8" if spec.has_quantized_kv_cache else "")
    raise LayoutError(
        "kv_cache.dtype", kv_cache.dtype, f"{limit} with kv_cache_dtype={spec.kv_cache_dtype!r}"
    )
