"""Pages of all requests in a row, by one kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnplug.ops.triton.kernels.page_indices import page_indices_kernel
from attnplug.ops.triton.launch import BoundKernel, on_device_of

__all__ = ["gather_page_indices"]

_KERNEL: Any = page_indices_kernel
_BLOCK = 512
"""Pages that a program copies at a time."""


def gather_page_indices(
    block_table: torch.Tensor, indptr: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """As `attnplug.ops.page_indices.gather_page_indices`, in one launch."""
    bound = _bound(*block_table.stride(), block_table.dtype, rows is not None)
    with on_device_of(out):
        bound((indptr.shape[0] - 1,), block_table, indptr, indptr if rows is None else rows, out)
    return out


@functools.lru_cache(maxsize=64)
def _bound(stride_row: int, stride_page: int, dtype: torch.dtype, has_rows: bool) -> BoundKernel:
    """The kernel for tables of these strides and this type: engines keep one, and gather in each step."""
    values = {
        "stride_row": stride_row,
        "stride_page": stride_page,
        "HAS_ROWS": has_rows,
        "BLOCK": _BLOCK,
    }
    return BoundKernel(_KERNEL, 4, values)
