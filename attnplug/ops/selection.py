"""Chosen positions as the keys that a query sees, and as a page table of single tokens."""

from __future__ import annotations

import torch

from attnplug.core.selection import Selection
from attnplug.core.sparse import SparseSpec


def chosen_keys(
    selection: Selection, sparse: SparseSpec, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys that queries see: chosen, and in their range. Nothing is checked, and no host waits.

    Positions that are no key of the query are left out, as are a second copy of one, and counts below 0.

    Args:
        selection: of T queries, or more.
        sparse: of the layer.
        low: int64 `[T]`, the first position that the layer's mask shows to each query.
        high: int64 `[T]`, one past the last.

    Returns:
        Positions int64 `[T, K]` in ascending order, K being `sparse.block` times the width of the selection, then
        -1; and their number, int64 `[T]`.
    """
    tokens = low.shape[0]
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
    if device.type != "cpu" or bool(again.any()):
        keys[:, 1:].masked_fill_(again, beyond)
        keys = keys.sort(dim=1).values
    seen = keys != beyond
    return keys.masked_fill(~seen, -1), seen.sum(dim=1)


def slots_of_keys(
    keys: torch.Tensor, requests: torch.Tensor, block_table: torch.Tensor, block_size: int
) -> torch.Tensor:
    """The page table of a kernel that reads pages of one token, such as for each query a request of its own.

    Args:
        keys: `[T, K]`, positions within the request of each query; negative for none.
        requests: int64 `[T]`, the request of each query.
        block_table: int32 `[R, max_blocks]`.
        block_size: tokens of a page.

    Returns:
        Slots int64 `[T, K]`, -1 for none. Int64, because a slot of a large cache can exceed 32 bits.
    """
    at = keys.clamp(min=0).long()
    blocks = block_table[requests[:, None], at // block_size].long()
    return torch.where(keys >= 0, blocks * block_size + at % block_size, -1)
