"""The dtypes of a layer: of its computation, and of its pages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from attnplug.core.errors import LayoutError
from attnplug.core.spec import LayerSpec

__all__ = ["STORAGE_DTYPES", "compute_dtype", "storage_dtype", "typed_view"]

STORAGE_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
        "fp8": torch.float8_e4m3fn,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
        "fp8_e5m2": torch.float8_e5m2,
        "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
        "int8": torch.int8,
        "uint8": torch.uint8,
    }
)
"""By resolved name; see `LayerSpec.resolved_kv_cache_dtype`."""


def compute_dtype(spec: LayerSpec) -> torch.dtype:
    """The torch dtype of the layer's queries, keys, values and outputs."""
    return STORAGE_DTYPES[spec.dtype]


def storage_dtype(spec: LayerSpec) -> torch.dtype:
    """The dtype of the layer's cache; LayoutError unless it is a float type of torch."""
    dtype = STORAGE_DTYPES.get(spec.resolved_kv_cache_dtype)
    if dtype is None or not dtype.is_floating_point:
        floats = ", ".join(name for name, each in STORAGE_DTYPES.items() if each.is_floating_point)
        raise LayoutError("kv_cache_dtype", spec.kv_cache_dtype, f"must be one of {floats}")
    return dtype


def typed_view(kv_cache: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """The cache in its dtype; a raw fp8 pool may be uint8; LayoutError for a cache of another dtype."""
    dtype = storage_dtype(spec)
    if kv_cache.dtype == dtype:
        return kv_cache
    if kv_cache.dtype == torch.uint8 and spec.has_quantized_kv_cache:
        return kv_cache.view(dtype)
    limit = f"must be {dtype}" + (" or torch.uint8" if spec.has_quantized_kv_cache else "")
    raise LayoutError(
        "kv_cache.dtype", kv_cache.dtype, f"{limit} with kv_cache_dtype={spec.kv_cache_dtype!r}"
    )


def in_words(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The same memory as elements of 16 or 8 bytes if all tensors allow it, else the tensors: for copies alone.

    PyTorch copies strided elements one by one, so wider ones take less time. The dtypes of all tensors must be equal.
    """
    if len({each.dtype for each in tensors}) > 1:
        return list(tensors)
    # Some devices have no numbers in double precision.
    has_double = all(each.device.type in ("cpu", "cuda") for each in tensors)
    for words in (torch.complex128, torch.int64) if has_double else (torch.int64,):
        if all(_has_words(each, words.itemsize) for each in tensors):
            return [each.view(words) for each in tensors]
    return list(tensors)


def _has_words(tensor: torch.Tensor, size: int) -> bool:
    """Whether the last dimension of `tensor` is in whole words of `size` bytes."""
    *strides, last = tensor.stride()
    elements = tensor.storage_offset(), tensor.shape[-1], *strides
    are_whole = not any(each * tensor.element_size() % size for each in elements)
    return last == 1 and are_whole and tensor.data_ptr() % size == 0
