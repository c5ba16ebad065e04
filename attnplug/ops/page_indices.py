"""The concatenated pages of all requests, for kernels with compressed page tables."""

from __future__ import annotations

import torch

from attnplug.ops.triton import triton_ops


def gather_page_indices(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """Write each request's pages after those of the requests before it, without waiting for a device.

    On a GPU one Triton kernel runs; without triton, a few torch operations.

    Args:
        block_table: int32 `[R, max_blocks]`; entries past a request's pages are not written.
        seq_lens: int32 or int64 `[R]`, tokens of each request.
        page_size: tokens of a page.
        rows: int32 `[n]`, the requests to write, in this order; None for all.
        out: int32, at least `count` long; the rest stays.
        count: their number of pages on the host; no more are written, and if the device has fewer, the places
            after them are undefined.

    Returns:
        `out`.
    """
    if not count:
        return out
    kernels = triton_ops("page_indices") if out.is_cuda else None
    if kernels is not None:
        kernels.gather_page_indices(block_table, seq_lens, page_size, rows, out, count)
        return out
    places = torch.arange(count, device=out.device)
    taken = None if rows is None else rows.long()
    lengths = seq_lens if taken is None else seq_lens[taken]
    ends = ((lengths.long() + (page_size - 1)) // page_size).cumsum(0)
    # `count` comes from the host, so no size is read back from the device.
    owners = torch.searchsorted(ends, places, right=True).clamp_(max=len(ends) - 1)
    before = torch.nn.functional.pad(ends, (1, 0))
    columns = (places - before[owners]).clamp_(max=block_table.shape[1] - 1)
    out[:count] = block_table[owners if taken is None else taken[owners], columns]
    return out
