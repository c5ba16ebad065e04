"""Whether tensors share bytes: exact for any strides, from addresses and strides alone, so nothing waits for a device."""

from __future__ import annotations

import functools
from typing import TypeAlias

import torch

_Dims: TypeAlias = tuple[tuple[int, int], ...]
"""Strides in bytes and sizes, the largest stride first; the last dimension is in the width of a run."""


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a byte belongs to an element of both tensors."""
    start, begin = one.data_ptr(), other.data_ptr()
    low, gap = (one, begin - start) if start <= begin else (other, start - begin)
    # Most pairs are far apart, which the addresses alone tell.
    if gap and gap >= _bytes(low):
        return False
    # Tensors without values or elements have no bytes; they also have no addresses.
    if one.is_meta or other.is_meta or not one.numel() or not other.numel():
        return False
    if not gap:
        return True
    high = other if low is one else one
    forms = low.shape, low.stride(), low.element_size(), high.shape, high.stride(), high.element_size()
    return _share(gap, *forms)


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor share a byte, such as those of an expanded dimension."""
    return not tensor.is_contiguous() and _overlaps(tensor.shape, tensor.stride())


def byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte of a tensor with elements, and one past that of its last."""
    start = tensor.data_ptr()
    return start, start + _bytes(tensor)


def allocation(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of the memory that a tensor views, and of the byte after the last one."""
    storage = tensor.untyped_storage()
    first = storage.data_ptr()
    return first, first + storage.nbytes()


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last of a tensor with elements."""
    # Contiguous tensors are the usual ones, and torch knows their bytes.
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return (last + 1) * tensor.element_size()


# Engines give views of the same form in each step and layer.
@functools.lru_cache(maxsize=256)
def _share(
    gap: int,
    shape: torch.Size,
    strides: tuple[int, ...],
    item: int,
    other: torch.Size,
    other_strides: tuple[int, ...],
    other_item: int,
) -> bool:
    (width, dims), (width_b, dims_b) = _runs(shape, strides, item), _runs(other, other_strides, other_item)
    return gap < _span(width, dims) and _meet(gap, width, dims, width_b, dims_b)


@functools.lru_cache(maxsize=256)
def _overlaps(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    if 0 in shape:
        return False
    if any(not stride and size > 1 for stride, size in zip(strides, shape, strict=True)):
        return True
    width, dims = _runs(shape, strides, 1)
    while dims:
        (stride, size), dims = dims[0], dims[1:]
        # A copy of the inner part that is shifted by less than its span may meet it.
        shifts = range(stride, min(_span(width, dims), stride * size), stride)
        if any(_meet(shift, width, dims, width, dims) for shift in shifts):
            return True
    return False


def _runs(shape: torch.Size, strides: tuple[int, ...], item: int) -> tuple[int, _Dims]:
    """The bytes of a contiguous run, and the dimensions over which runs repeat; expanded ones add no bytes."""
    sizes = zip(strides, shape, strict=True)
    found = sorted((stride * item, size) for stride, size in sizes if stride and size > 1)
    width, dims = item, [(0, 0)] * 0
    for stride, size in found:
        if stride == width and not dims:
            width *= size
        elif dims and stride == dims[0][0] * dims[0][1]:
            dims[0] = dims[0][0], dims[0][1] * size
        else:
            dims.insert(0, (stride, size))
    return width, tuple(dims)


def _span(width: int, dims: _Dims) -> int:
    """Bytes from the first to the last."""
    return width + sum(stride * (size - 1) for stride, size in dims)


def _meet(gap: int, width: int, dims: _Dims, width_b: int, dims_b: _Dims) -> bool:
    """Whether runs of one tensor meet those of another, which begins `gap` bytes after it."""
    if not dims and not dims_b:
        return -width_b < gap < width
    stride = max(each[0][0] for each in (dims, dims_b) if each)
    count = count_b = 1
    if dims and dims[0][0] == stride:
        count, dims = dims[0][1], dims[1:]
    if dims_b and dims_b[0][0] == stride:
        count_b, dims_b = dims_b[0][1], dims_b[1:]
    # Only pairs of inner parts this many strides apart can meet: one or two, if the parts are within a stride.
    first = max(1 - count, (-_span(width_b, dims_b) - gap) // stride + 1)
    last = min(count_b - 1, -((gap - _span(width, dims)) // stride) - 1)
    return any(_meet(gap + k * stride, width, dims, width_b, dims_b) for k in range(first, last + 1))
