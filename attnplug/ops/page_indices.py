"""The pages of all requests in a row, as kernels with compressed page tables read them."""

from __future__ import annotations

import torch

from attnplug.ops.accelerated import triton_ops

__all__ = ["gather_page_indices"]


def gather_page_indices(
    block_table: torch.Tensor, indptr: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor, count: int
) -> torch.Tensor:
    """Write each request's pages behind those of the request before it; nothing waits for a device.

    On a GPU it is one Triton kernel; without triton, a few torch operations.

    Args:
        block_table: int32 `[R, max_blocks]`; entries past a request's pages are not read.
        indptr: int32 `[n + 1]`, where each request's pages go in `out`.
        rows: int32 `[n]`, its row of the table; None where row i is request i's.
        out: int32, at least `count` long; the rest of it stays.
        count: `indptr[n]`, as the host knows it.

    Returns:
        `out`.
    """
    if not count:
        return out
    kernels = triton_ops("page_indices") if out.is_cuda else None
    if kernels is not None:
        kernels.gather_page_indices(block_table, indptr, rows, out)
        return out
    reqs = torch.arange(indptr.shape[0] - 1, device=out.device)
    owners = torch.repeat_interleave(reqs, indptr.diff().long(), output_size=count)
    columns = torch.arange(count, device=out.device) - indptr[owners]
    out[:count] = block_table[owners if rows is None else rows.long()[owners], columns]
    return out
