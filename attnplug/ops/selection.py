"""Chosen positions as the keys that a query sees, and as a page table of single tokens."""

from __future__ import annotations

import torch

from attnplug.core.arguments import at_least, checked, integers
from attnplug.core.errors import BatchError
from attnplug.core.selection import Selection
from attnplug.core.sparse import SparseSpec
from attnplug.ops.checks import check_numbers
from attnplug.ops.triton import triton_ops


def _steps(field: str, value: object) -> tuple[int, int]:
    found = integers(field, value)
    # A dimension of one element has no step.
    if len(found) != 2 or min(found) < 0:
        limit = "must be two integers of at least 0, (from block to block, from token to token)"
        raise BatchError(field, value, limit)
    return found[0], found[1]


@checked(selection=Selection, sparse=SparseSpec, low="T: int64", high="T: int64")
def chosen_keys(
    selection: Selection, sparse: SparseSpec, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys that queries see: chosen, and in their range. It reads no values for checks, so no host waits.

    Positions that are no key of the query are left out, as are a second copy of one, and counts below 0.

    Args:
        selection: of T queries, or more.
        sparse: of the layer.
        low: int64 `[T]`, the first position that the layer's mask shows to each query.
        high: int64 `[T]`, one past the last.

    Returns:
        Positions int64 `[T, K]` in ascending order, K being `sparse.block` times the width of the selection, then
        -1; and their number, int64 `[T]`.

    Raises:
        BatchError: bounds of another shape or dtype, or a selection of fewer queries.
    """
    tokens = low.shape[0]
    selection.check_size(tokens)
    chosen, counts = selection.positions[:tokens].long(), selection.counts[:tokens].clamp(max=sparse.topk)
    device = chosen.device
    seen = (torch.arange(chosen.shape[1], device=device) < counts[:, None]) & (chosen >= 0)
    if sparse.block > 1:
        chosen = chosen[:, :, None] * sparse.block + torch.arange(sparse.block, device=device)
        chosen = chosen.flatten(1)
        seen = seen.repeat_interleave(sparse.block, dim=1)
    seen &= (chosen >= low[:, None]) & (chosen < high[:, None])
    # Positions that are not seen sort behind all others.
    beyond = torch.iinfo(torch.int64).max
    keys = chosen.masked_fill(~seen, beyond).sort(dim=1).values
    again = keys[:, 1:] == keys[:, :-1]
    again &= keys[:, 1:] != beyond
    # On a device the host would wait for the test, so the second sort always runs there.
    if device.type != "cpu" or bool(again.any()):
        keys[:, 1:].masked_fill_(again, beyond)
        keys = keys.sort(dim=1).values
    seen = keys != beyond
    return keys.masked_fill(~seen, -1), seen.sum(dim=1)


@checked(
    keys="T K: integers",
    requests="T: int64",
    block_table="R M: int32",
    block_size=at_least(1),
    steps=_steps,
)
def slots_of_keys(
    keys: torch.Tensor,
    requests: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    steps: tuple[int, int] | None = None,
) -> torch.Tensor:
    """The page table of a kernel that reads pages of one token, such as for each query a request of its own.

    Args:
        keys: `[T, K]`, positions within the request of each query; negative for none.
        requests: int64 `[T]`, the request of each query.
        block_table: int32 `[R, max_blocks]`.
        block_size: tokens of a page.
        steps: slots from block to block, and from token to token; by default blocks follow each other.

    Returns:
        Slots int64 `[T, K]`, -1 for none. Int64, because a slot of a large cache can exceed 32 bits.

    Raises:
        BatchError: tensors of other shapes or dtypes; on a CPU also a request or a page that the table does not have.
    """
    by_block, by_token = steps or (block_size, 1)
    at = keys.clamp(min=0).long()
    columns = at // block_size
    if keys.device.type == "cpu":
        rows, width = block_table.shape
        check_numbers("requests", requests, 0, rows, f"must be in 0 .. {rows - 1}, the rows of block_table")
        check_numbers("keys", columns, 0, width, f"is a page past the {width} of a row of block_table")
    blocks = block_table[requests[:, None], columns].long()
    if keys.device.type == "cpu":
        check_numbers("block_table", blocks[keys >= 0], 0, None)
        _check_largest(int(blocks.max()) if blocks.numel() else 0, by_block, block_size, by_token)
    else:
        # The table is int32, so no value of it has to be read.
        _check_largest(2**31 - 1, by_block, block_size, by_token)
    return torch.where(keys >= 0, blocks * by_block + at % block_size * by_token, -1)


def _check_largest(block: int, by_block: int, block_size: int, by_token: int) -> None:
    """BatchError if the last slot of a block does not fit int64."""
    if block * by_block + (block_size - 1) * by_token >= 1 << 63:
        limit = f"gives the tokens of block {block} slots past int64"
        raise BatchError("block_size", block_size, limit)


@checked(
    selection=Selection,
    sparse=SparseSpec,
    query_start_loc="R+1: int32",
    seq_lens="R: int32",
    block_table="R M: int32",
    block_size=at_least(1),
    steps=_steps,
    page_table="T K: int32",
    counts="T: int32",
    ends="T: int32",
)
def table_of_tokens(
    selection: Selection,
    sparse: SparseSpec,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    steps: tuple[int, int],
    page_table: torch.Tensor,
    counts: torch.Tensor,
    ends: torch.Tensor,
) -> None:
    """Write the chosen keys of every query as pages of one token, without waiting for a device.

    On a GPU one Triton kernel runs; without triton, a few torch operations. Positions that are no key of the query
    are left out, as are counts below 0. The kernel relies on positions that differ.

    Args:
        selection: of T queries, or more.
        sparse: of the layer.
        query_start_loc: int32 `[R + 1]`.
        seq_lens: int32 `[R]`: row j of a request with q queries and s tokens sees positions up to s - q + j.
        block_table: int32 `[R, max_blocks]`.
        block_size: tokens of a page.
        steps: pages of one token from block to block, and from token to token.
        page_table: int32 `[T, K]`, written, with a row stride of any size; entries past a query's keys are undefined
            pages that exist.
        counts: int32 `[T]`, written: the keys of each query, at most K.
        ends: int32 `[T]`, written: see `query_ends`.
    """
    kernels = triton_ops("selection") if page_table.is_cuda else None
    if kernels is not None:
        given = selection, sparse, query_start_loc, seq_lens, block_table
        kernels.table_of_tokens(*given, block_size, steps, page_table, counts, ends)
        return
    requests, high = requests_and_ends(query_start_loc, seq_lens, page_table.shape[0])
    ends.copy_(high)
    keys, found = chosen_keys(selection, sparse, torch.zeros_like(high), high)
    width = min(keys.shape[1], page_table.shape[1])
    slots = slots_of_keys(keys[:, :width], requests, block_table, block_size, steps)
    # Kernels may load entries past a query's keys, so these must be pages that exist.
    page_table[:, :width] = slots.clamp_(min=0)
    counts.copy_(found.clamp_(max=width))


@checked(query_start_loc="R+1: int32", seq_lens="R: int32", ends="T: int32")
def query_ends(query_start_loc: torch.Tensor, seq_lens: torch.Tensor, ends: torch.Tensor) -> None:
    """Write how many keys each query sees, before any are chosen, without waiting for a device.

    Args:
        query_start_loc: int32 `[R + 1]`.
        seq_lens: int32 `[R]`.
        ends: int32 `[T]`, written: one past the position of each query, at least 0.
    """
    kernels = triton_ops("selection") if ends.is_cuda else None
    if kernels is not None:
        kernels.query_ends(query_start_loc, seq_lens, ends)
        return
    ends.copy_(requests_and_ends(query_start_loc, seq_lens, ends.shape[0])[1])


def requests_and_ends(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The request of each of `tokens` queries, and one past its position, at least 0; both int64 `[T]`."""
    rows = torch.arange(tokens, device=seq_lens.device)
    starts = query_start_loc.long()
    # Rows past the last query, such as padding, still need an index in range.
    requests = torch.searchsorted(starts[1:], rows, right=True).clamp_(max=max(starts.shape[0] - 2, 0))
    ends = seq_lens.long()[requests] - starts[requests + 1] + rows + 1
    return requests, ends.clamp_(min=0)
