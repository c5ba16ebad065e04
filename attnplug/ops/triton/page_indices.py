"""Pages of all requests in a row, by one kernel."""

from __future__ import annotations

from typing import Any

import torch

from attnplug.ops.triton.kernels.page_indices import page_indices_kernel
from attnplug.ops.triton.launch import on_device_of

__all__ = ["gather_page_indices"]

_KERNEL: Any = page_indices_kernel
_BLOCK = 512
"""Pages that a program copies at a time."""


def gather_page_indices(
    block_table: torch.Tensor, indptr: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """As `attnplug.ops.page_indices.gather_page_indices`, in one launch."""
    with on_device_of(out):
        _KERNEL[(indptr.shape[0] - 1,)](
            block_table,
            indptr,
            indptr if rows is None else rows,
            out,
            block_table.stride(0),
            block_table.stride(1),
            HAS_ROWS=rows is not None,
            BLOCK=_BLOCK,
        )
    return out
