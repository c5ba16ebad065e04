"""Which bytes a tensor has, and whether tensors share some; nothing is read, so a GPU is not waited for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import torch

_MOST_WORK = 100_000
"""Steps of the exact search, about a millisecond. Views of caches need a few."""


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common. Views of interleaved rows, such as keys and values, have none."""
    return one.device == other.device and _share(_places(one), _places(other))


def allocation(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte of the memory of which a tensor is a view, and of the byte after the last one."""
    storage = tensor.untyped_storage()
    first = storage.data_ptr()
    return first, first + storage.nbytes()


_Places: TypeAlias = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""The address of a tensor, the bytes of an element, its sizes, and its strides in elements."""


def _places(tensor: torch.Tensor) -> _Places:
    return tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tensor.stride()


@functools.lru_cache(maxsize=1024)
def _share(one: _Places, other: _Places) -> bool:
    """As `share_memory`; the caches of a model are the same in each step."""
    (first, end), (other_first, other_end) = _extent(*one), _extent(*other)
    if max(first, other_first) >= min(end, other_end):
        return False
    try:
        # The stubs of numpy know two values of max_work; its documentation allows any.
        most: Any = _MOST_WORK
        return bool(np.shares_memory(_described(*one), _described(*other), max_work=most))
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may have the same place, such as those of an expanded dimension."""
    return _overlaps(tuple(tensor.shape), tensor.stride())


@functools.lru_cache(maxsize=1024)
def _overlaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    reach = 0
    dims = [(stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1]
    for stride, size in sorted(dims):
        if stride <= reach:
            return 0 not in shape
        reach += stride * (size - 1)
    return False


def _extent(first: int, size: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """The address of the first byte, and of the byte after the last one."""
    if 0 in shape:
        return first, first
    last = sum(stride * (count - 1) for stride, count in zip(strides, shape, strict=True))
    return first, first + (last + 1) * size


class _Described:
    """Gives numpy the address, sizes and strides of a tensor. The address may be that of a GPU."""

    def __init__(self, first: int, size: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": shape,
            "strides": tuple(size * stride for stride in strides),
            "data": (first, True),
        }


def _described(first: int, size: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    return np.asarray(_Described(first, size, shape, strides))
