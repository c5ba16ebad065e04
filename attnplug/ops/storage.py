"""The dtypes of a layer: of its computation, and of its pages.

Outputs of 8 bits with one scale, quantised in plain torch.
"""

from __future__ import annotations

import functools
import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch

from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.kv_format import KVFormat, kv_format, kv_format_of_dtype, kv_formats
from attnplug.core.spec import LayerSpec

__all__ = ["STORAGE_DTYPES", "compute_dtype", "storage_dtype", "typed_view"]


Rounding: TypeAlias = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
"""Rounds values to elements of a dtype, and may write into the values."""


class _StorageDtypes(Mapping[str, torch.dtype]):
    """Reads the table of stored types at each look-up."""

    def __getitem__(self, name: str) -> torch.dtype:
        dtype = kv_format(name).dtype
        if dtype is None:
            raise KeyError(name)
        found: torch.dtype = getattr(torch, dtype)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for row in kv_formats() if row.dtype is not None for name in row.names)

    def __len__(self) -> int:
        return len(list(iter(self)))


STORAGE_DTYPES: Mapping[str, torch.dtype] = _StorageDtypes()
"""By resolved name; see `LayerSpec.resolved_kv_cache_dtype`."""


def compute_dtype(spec: LayerSpec) -> torch.dtype:
    """The torch dtype of the layer's queries, keys, values and outputs."""
    return STORAGE_DTYPES[spec.dtype]


def storage_dtype(spec: LayerSpec) -> torch.dtype:
    """The dtype of the layer's cache; LayoutError unless the table of stored types knows its numbers."""
    row = kv_format(spec.resolved_kv_cache_dtype)
    if row.dtype is None or not row.has_numbers:
        known = ", ".join(name for row in kv_formats() if row.has_numbers for name in row.names)
        raise LayoutError("kv_cache_dtype", spec.kv_cache_dtype, f"must be one of {known}")
    return STORAGE_DTYPES[row.name]


def rounding_of(row: KVFormat | None) -> Rounding | None:
    """The function that rounds to elements of a stored type; None if there is none."""
    return None if row is None or row.rounding is None else _function(row.rounding)


def rounding_to(pages: torch.dtype) -> Rounding | None:
    """The same for the stored type of pages with elements of a dtype."""
    return rounding_of(kv_format_of_dtype(str(pages).removeprefix("torch.")))


# A name is resolved by an import, and each write of 8-bit pages asks for it.
_function: Callable[[str], Rounding] = functools.lru_cache(pkgutil.resolve_name)


def round_to_float(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest floats; values beyond the range of 8-bit floats become the largest finite ones."""
    if dtype.itemsize > 1:
        return values.to(dtype)
    limit = torch.finfo(dtype).max
    # The conversion of values beyond the range may give NaN or infinity.
    return values.clamp_(-limit, limit).to(dtype)


def typed_view(kv_cache: torch.Tensor, spec: LayerSpec) -> torch.Tensor:
    """The cache in its dtype; a raw fp8 pool may be uint8; LayoutError for a cache of another dtype."""
    dtype = storage_dtype(spec)
    if kv_cache.dtype == dtype:
        return kv_cache
    # Engines without float8 types keep such caches as bytes.
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


FP8_OUTPUTS: Mapping[str, torch.dtype] = MappingProxyType(
    {row.name: STORAGE_DTYPES[row.name] for row in kv_formats() if row.family == "fp8" and row.dtype}
)
"""The fp8 dtypes of outputs, by their `quant_key`."""


def check_output_scale(output: torch.Tensor, output_scale: torch.Tensor) -> None:
    """BatchError unless `output` is of 8-bit floats, and `output_scale` is one float32, finite and above 0.

    The value is read only on a CPU, where that waits for no device.
    """
    if output.dtype not in FP8_OUTPUTS.values():
        limit = f"needs an output of {', '.join(map(str, FP8_OUTPUTS.values()))}, and it is {output.dtype}"
        raise BatchError("output_scale", tuple(output_scale.shape), limit)
    if output_scale.numel() != 1 or output_scale.dtype != torch.float32:
        found = f"{output_scale.dtype} {tuple(output_scale.shape)}"
        raise BatchError("output_scale", found, "must be one torch.float32")
    if output_scale.device.type == "cpu":
        value = float(output_scale)
        if not 0 < value < math.inf:
            raise BatchError("output_scale", value, "must be finite and above 0: outputs are divided by it")


def quotient(numbers: torch.Tensor, divisor: float) -> torch.Tensor:
    """`numbers / divisor`, rounded once on each device: on a GPU torch multiplies by the reciprocal of a number."""
    return numbers if divisor == 1 else numbers / numbers.new_full((), divisor)


def quantise_output(wide: torch.Tensor, output_scale: torch.Tensor, output: torch.Tensor) -> None:
    """Write float32 `wide` / `output_scale`, clamped to the finite range of fp8, to `output` of the same shape."""
    output.copy_(round_to_float(wide / output_scale.reshape(()), output.dtype))
