"""The concatenated pages of all requests, by one kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch

from attnplug.ops.triton.kernels.page_indices import page_indices_kernel
from attnplug.ops.triton.launch import BoundKernel, on_device_of

_KERNEL: Any = page_indices_kernel
_BLOCK = 512
"""Pages that a program copies at a time, and earlier requests that it counts at a time."""


def gather_page_indices(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """As `attnplug.ops.page_indices.gather_page_indices`, in one launch."""
    dtypes = block_table.dtype, seq_lens.dtype
    bound = _bound(*block_table.stride(), *dtypes, page_size, rows is not None)
    seq_lens = seq_lens.contiguous()
    requests = (seq_lens if rows is None else rows).shape[0]
    with on_device_of(out):
        bound((requests,), block_table, seq_lens, seq_lens if rows is None else rows, out, count)
    return out


@functools.lru_cache(maxsize=64)
def _bound(
    stride_row: int,
    stride_page: int,
    table_dtype: torch.dtype,
    lens_dtype: torch.dtype,
    page_size: int,
    has_rows: bool,
) -> BoundKernel:
    """The kernel for tables of these strides and dtypes; cached, because engines keep theirs."""
    values = {
        "stride_row": stride_row,
        "stride_page": stride_page,
        "PAGE_SIZE": page_size,
        "HAS_ROWS": has_rows,
        "BLOCK": _BLOCK,
    }
    return BoundKernel(_KERNEL, 5, values)
