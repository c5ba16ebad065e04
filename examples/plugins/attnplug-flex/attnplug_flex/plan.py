"""The part of a step that all layers of one reach share: which keys to gather, and block masks over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from attnplug.ops import Reach
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

__all__ = ["Ints", "Piece", "Plan"]

Ints = npt.NDArray[np.int64]

_TILE = 128
"""Rows and keys of a block of a block mask."""
_SCORES = 1 << 19
"""Scores per head that uncompiled FlexAttention may make at once; it keeps several copies of them all."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Queries that are attended in one call, and the run of gathered keys that they see.

    Args:
        rows: of the packed queries.
        keys: of the gathered keys.
        mask: which of `keys` each row sees; the same for all heads.
        places: int32 `[rows]`, the rows' own places, counted from the first of `keys`.
    """

    rows: slice
    keys: slice
    mask: BlockMask
    places: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One step for the layers of one reach.

    Keys that any query of a request sees are gathered into one run per request. A row then sees a run of gathered keys, `low <= key < high`, and masks need no more than those two numbers per row.

    Args:
        requests: int64 `[N]`, the request of each gathered key.
        keys: int64 `[N]`, its position there, or its row of the keys that come with the call.
        pieces: together all rows that see anything.
    """

    requests: torch.Tensor
    keys: torch.Tensor
    pieces: list[Piece]

    @classmethod
    def of(
        cls,
        starts: Ints,
        ends: Ints,
        first: Ints,
        origin: Ints,
        reach: Reach,
        *,
        whole: bool,
        device: torch.device,
    ) -> Plan:
        """The plan of a batch.

        Args:
            starts: `[R + 1]`, where each request's queries start.
            ends: `[R]`, the length of each request.
            first: `[R]`, the position of the first key that it has.
            origin: `[R]`, what is added to positions in `keys`.
            reach: which of them a query sees.
            whole: one piece for everything, as compiled kernels need; they make no scores.
            device: where the tensors go.
        """
        counts = np.diff(starts)
        owner = np.repeat(np.arange(counts.size), counts)
        positions = np.arange(starts[0], starts[-1]) - starts[:-1][owner] + (ends - counts)[owner]
        low, high = reach.bounds(positions, first[owner], ends[owner])

        asked = np.flatnonzero(counts)
        begin, spans = np.zeros_like(counts), np.zeros_like(counts)
        begin[asked] = low[starts[asked] - starts[0]]
        spans[asked] = high[starts[asked + 1] - starts[0] - 1] - begin[asked]
        shift = np.cumsum(spans) - spans - begin
        requests = np.repeat(np.arange(counts.size), spans)
        keys = np.arange(requests.size) + (origin - shift)[requests]
        if whole and requests.size:
            # torch.compile would make further kernels for one key and for one block of them: there are two or more.
            missing = max(-requests.size % _TILE, 2 * _TILE - requests.size)
            requests, keys = (np.pad(each, (0, missing), "edge") for each in (requests, keys))

        low, high, places = (each + shift[owner] for each in (low, high, positions))
        cuts = [(0, owner.size, 0, requests.size)] if whole else _cuts(low, high)
        pieces = []
        for start, stop, low_key, high_key in cuts:
            if high_key > low_key and stop > start:
                bounds = [_to(device, each[start:stop] - low_key).int() for each in (low, high, places)]
                rows = slice(int(starts[0]) + start, int(starts[0]) + stop)
                mask = _mask(bounds[0], bounds[1], high_key - low_key)
                pieces.append(Piece(rows, slice(low_key, high_key), mask, bounds[2]))
        return cls(_to(device, requests), _to(device, keys), pieces)


def _cuts(low: Ints, high: Ints) -> Iterator[tuple[int, int, int, int]]:
    """As many rows at a time as keep rows x keys within bounds, at least one: `rows [a, b)`, `keys [c, d)`."""
    start = 0
    while start < low.size:
        scores = np.arange(1, low.size - start + 1) * (high[start:] - low[start])
        stop = start + max(int(np.searchsorted(scores, _SCORES, side="right")), 1)
        yield start, stop, int(low[start]), int(high[stop - 1])
        start = stop


def _mask(low: torch.Tensor, high: torch.Tensor, keys: int) -> BlockMask:
    """The block mask of rows that see `low <= key < high`; made from the bounds, with no row x key matrix."""

    def sees(batch: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key >= low[row]) & (key < high[row])

    rows = low.shape[0]
    edges = torch.arange(0, keys, _TILE, device=low.device)
    low_of, high_of = low[:, None], high[:, None]
    some = (low_of < edges + _TILE) & (high_of > edges) & (low_of < high_of)
    every = (low_of <= edges) & (high_of >= edges + _TILE)
    missing, blocks = (0, 0, 0, -rows % _TILE), (-1, _TILE, edges.shape[0])
    touched = pad(some, missing, value=False).view(blocks).any(1)
    full = pad(every, missing, value=True).view(blocks).all(1)
    return BlockMask.from_kv_blocks(
        *_listed(touched & ~full), *_listed(full), BLOCK_SIZE=_TILE, mask_mod=sees, seq_lengths=(rows, keys)
    )


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of blocks of each row that are set, int32 `[1, 1, rows]`, and which, those first, `[1, 1, rows, blocks]`."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None].contiguous()


def _to(device: torch.device, array: Ints) -> torch.Tensor:
    return torch.from_numpy(array).to(device)
