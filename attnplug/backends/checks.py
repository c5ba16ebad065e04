"""Refusals of tensors that do not fit the layer: each names the argument, what was found, and the limit."""

from __future__ import annotations

import torch

from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.spec import LayerSpec

__all__ = ["check_cache", "check_keys", "check_rows", "refuse_output_scales"]


def check_rows(name: str, tensor: torch.Tensor, rows: int, tail: tuple[int, ...], dtype: torch.dtype) -> None:
    """BatchError unless `tensor` is `[at least rows, *tail]` of `dtype`."""
    shape = tuple(tensor.shape)
    if len(shape) != 1 + len(tail) or shape[1:] != tail or shape[0] < rows:
        expected = ", ".join(map(str, (f"at least {rows}", *tail)))
        raise BatchError(name, shape, f"must have the shape ({expected})")
    if tensor.dtype != dtype:
        raise BatchError(f"{name}.dtype", tensor.dtype, f"must be {dtype}")


def check_keys(
    key: torch.Tensor | None, value: torch.Tensor | None, rows: int, spec: LayerSpec, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value, both given; BatchError unless they are `[at least rows, Hkv, D]` and as many values."""
    for name, tensor in (("key", key), ("value", value)):
        if tensor is None:
            raise BatchError(name, None, "is required: it is not in a KV cache")
    if key is None or value is None:
        raise BatchError("key", None, "is required")
    check_rows("key", key, rows, (spec.num_kv_heads, spec.head_size), dtype)
    check_rows("value", value, rows, (spec.num_kv_heads, spec.head_size_v), dtype)
    return key, value


def check_cache(kv_cache: torch.Tensor, spec: LayerSpec) -> None:
    """LayoutError unless `kv_cache` has the logical shape of the layer's cache."""
    heads, block = spec.num_kv_heads, spec.block_size or "block_size"
    if spec.head_size_v == spec.head_size:
        limits: tuple[int | str, ...] = ("num_blocks", 2, block, heads, spec.head_size)
    else:
        limits = ("num_blocks", block, heads, spec.head_size + spec.head_size_v)
    shape = tuple(kv_cache.shape)
    fits = len(shape) == len(limits) and all(
        isinstance(limit, str) or found == limit for found, limit in zip(shape, limits, strict=True)
    )
    if not fits:
        expected = ", ".join(map(str, limits))
        remedy = "pass the logical view; the physical order shows only in the strides"
        raise LayoutError("kv_cache", shape, f"must have the shape ({expected})", remedy)


def refuse_output_scales(**scales: torch.Tensor | None) -> None:
    """BatchError where an output scale is given: outputs are written in the layer's dtype only."""
    for name, scale in scales.items():
        if scale is not None:
            raise BatchError(name, tuple(scale.shape), "must be None", "quantise the output after attention")
