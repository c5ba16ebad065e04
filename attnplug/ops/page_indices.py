"""The concatenated pages of all requests, for kernels with compressed page tables."""

from __future__ import annotations

import torch

from attnplug.core.arguments import at_least, checked
from attnplug.core.errors import BatchError
from attnplug.ops.checks import check_numbers
from attnplug.ops.triton import triton_ops


@checked(
    block_table="R M: integers",
    seq_lens="S: integers",
    page_size=at_least(1),
    rows="?n: int32",
    out="T: int32",
    count=at_least(0),
)
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
        block_table: int32 or int64 `[R, max_blocks]`; entries past a request's pages are not written.
        seq_lens: int32 or int64 `[R]`, tokens of each request.
        page_size: tokens of a page.
        rows: int32 `[n]`, the requests to write, in this order; None for all.
        out: int32, at least `count` long; the rest stays.
        count: their number of pages on the host; no more are written, and if the device has fewer, the places
            after them are undefined.

    Returns:
        `out`.

    Raises:
        BatchError: tensors of other shapes or dtypes, or fewer places than `count`; on a CPU also rows or lengths that the
            table does not have.
    """
    if not count:
        return out
    if rows is not None and not rows.shape[0]:
        raise BatchError("rows", (0,), f"must name the requests of {count} pages")
    if count > out.shape[0]:
        raise BatchError("count", count, f"must be at most {out.shape[0]}, the size of out")
    kernels = triton_ops("page_indices") if out.is_cuda else None
    if kernels is not None:
        kernels.gather_page_indices(block_table, seq_lens, page_size, rows, out, count)
        return out
    places = torch.arange(count, device=out.device)
    taken = None if rows is None else rows.long()
    if out.device.type == "cpu":
        reqs, most = block_table.shape
        if taken is not None:
            reqs = min(reqs, seq_lens.shape[0])
            check_numbers(
                "rows", taken, 0, reqs, f"must be in 0 .. {reqs - 1}, the rows of block_table and seq_lens"
            )
        limit = f"must be in 0 .. {most * page_size}, the tokens of a row of block_table"
        check_numbers("seq_lens", seq_lens, 0, most * page_size + 1, limit)
    if not seq_lens.shape[0]:
        raise BatchError("seq_lens", (0,), f"must have the lengths of {count} pages")
    lengths = seq_lens if taken is None else seq_lens[taken]
    ends = ((lengths.long() + (page_size - 1)) // page_size).cumsum(0)
    # `count` comes from the host, so no size is read back from the device.
    owners = torch.searchsorted(ends, places, right=True).clamp_(max=len(ends) - 1)
    before = torch.nn.functional.pad(ends, (1, 0))
    columns = (places - before[owners]).clamp_(max=block_table.shape[1] - 1)
    out[:count] = block_table[owners if taken is None else taken[owners], columns]
    return out
