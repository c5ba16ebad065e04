"""Which bytes a tensor has, and whether tensors share some; nothing is read, so a GPU is not waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

_MOST_WORK = 100_000
"""Steps of the exact search, about a millisecond. Views of caches need a few."""


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common. Views of interleaved rows, such as keys and values, have none."""
    (first, end), (other_first, other_end) = _extent(one), _extent(other)
    if one.device != other.device or max(first, other_first) >= min(end, other_end):
        return False
    try:
        # The stubs of numpy know two values of max_work; its documentation allows any.
        most: Any = _MOST_WORK
        return bool(np.shares_memory(_described(one), _described(other), max_work=most))
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may have the same place, such as those of an expanded dimension."""
    reach = 0
    dims = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    for stride, size in sorted(dims):
        if stride <= reach:
            return bool(tensor.numel())
        reach += stride * (size - 1)
    return False


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte, and of the byte after the last one."""
    first = tensor.data_ptr()
    if not tensor.numel():
        return first, first
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return first, first + (last + 1) * tensor.element_size()


class _Described:
    """Gives numpy the address, sizes and strides of a tensor. The address may be that of a GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "data": (tensor.data_ptr(), True),
        }


def _described(tensor: torch.Tensor) -> Any:
    return np.asarray(_Described(tensor))
