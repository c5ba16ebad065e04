"""Plans the tiles of short requests: the requests of each, and the rows of the cache to gather."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.backends.torch_native.source import KeySource
from attnplug.ops.reach import Reach

_Ints = npt.NDArray[np.int64]

Steps = tuple[int, int, int]
"""HeadRows.steps."""

_SLACK = 16
"""Keys of padding, beyond an eighth, from which a request starts another tile."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """B requests of q queries each, padded to L keys; padding repeats a request's last key.

    Args:
        queries: int64 `[B * q]`, rows of the packed queries.
        keys: int64 `[B, L]`, HeadRows rows of the keys' first heads; L is 0 if no key is seen.
        values: the same for the values.
        hidden: bool `[B, q, L]`, True where a key is not seen; None hides nothing.
        query_places: int64 `[B, q]`, places of the queries on the keys' axis.
        has_empty_rows: whether some query sees nothing.
        key_places: int64 `[B, L]`, the positions of keys that are not consecutive; None if the axis begins at place
            0. Query places are then positions too.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    hidden: torch.Tensor | None
    query_places: torch.Tensor
    has_empty_rows: bool
    key_places: torch.Tensor | None = None


def plan_tiles(
    metadata: TorchMetadata,
    requests: _Ints,
    source: KeySource,
    steps: tuple[Steps, Steps],
    reach: Reach,
    tile_tokens: int,
    device: torch.device,
) -> list[Tile]:
    """Tiles that cover `requests` (indices of requests with queries), of about `tile_tokens` keys.

    A tile has requests of one query length, longest first, which keeps padding small. A request longer than
    `tile_tokens` has a tile of its own, gathered in pieces. `steps` are those of the keys and of the values.
    """
    tiles: list[Tile] = []
    lens = metadata.query_lens[requests]
    for query_len in np.unique(lens).tolist():
        group = _Group.of(metadata, requests[lens == query_len], source, reach, query_len)
        for start, stop in buckets(group.spans):
            tiles += group.part(start, stop).tiles(source, steps, tile_tokens, device)
    return tiles


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Requests of one query length, longest span first: all host int64, `[B]` or `[B, q]`."""

    requests: _Ints
    starts: _Ints
    first: _Ints
    spans: _Ints
    low: _Ints
    high: _Ints
    positions: _Ints

    @classmethod
    def of(
        cls, metadata: TorchMetadata, requests: _Ints, source: KeySource, reach: Reach, query_len: int
    ) -> _Group:
        positions = (metadata.seq_lens[requests] - query_len)[:, None] + np.arange(query_len)
        starts = metadata.query_starts[requests]
        rows = starts[:, None] + np.arange(query_len)
        spans = None if metadata.spans is None else metadata.spans[rows]
        ends = source.end[requests][:, None]
        low, high = reach.bounds(positions, source.first[requests][:, None], ends, spans)
        first = low[:, 0]
        lengths = np.maximum(high[:, -1] - first, 0)
        order = np.argsort(-lengths, kind="stable")
        return cls(*(array[order] for array in (requests, starts, first, lengths, low, high, positions)))

    def part(self, start: int, stop: int) -> _Group:
        return _Group(*(getattr(self, field.name)[start:stop] for field in dataclasses.fields(self)))

    def tiles(
        self, source: KeySource, steps: tuple[Steps, Steps], tile_tokens: int, device: torch.device
    ) -> Iterator[Tile]:
        """The tiles of one bucket, whose indices are computed at once."""
        length = int(self.spans[0])
        low, high = self.low - self.first[:, None], self.high - self.first[:, None]
        rows = (self.starts[:, None] + np.arange(low.shape[1])).astype(np.int64)
        queries, places = _to(device, rows), _to(device, self.positions - self.first[:, None])
        keys, values = self._rows(source, steps, length, device)
        axis = torch.arange(length, device=device)
        count = self.spans.size if length == 0 else max(tile_tokens // length, 1)
        for start in range(0, self.spans.size, count):
            part = slice(start, start + count)
            width = int(self.spans[start])
            hidden = None
            if (low[part] > 0).any() or (high[part] < width).any():
                lows, highs = (_to(device, bound[part])[:, :, None] for bound in (low, high))
                hidden = (axis[:width] < lows) | (axis[:width] >= highs)
            empty = bool((high[part] <= low[part]).any())
            tile_keys, tile_values = keys[part, :width], values[part, :width]
            yield Tile(queries[part].reshape(-1), tile_keys, tile_values, hidden, places[part], empty)

    def _rows(
        self, source: KeySource, steps: tuple[Steps, Steps], length: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if length == 0:
            nothing = torch.empty(self.spans.size, 0, dtype=torch.int64, device=device)
            return nothing, nothing
        first, last = _to(device, self.first)[:, None], _to(device, self.first + self.spans - 1)[:, None]
        positions = torch.minimum(first + torch.arange(length, device=device), last)
        block, offset = source.locate(_to(device, self.requests), positions)
        keys, values = ((block * step[0]).add_(offset, alpha=step[1]) for step in steps)
        return keys, values


def buckets(spans: _Ints) -> Iterator[tuple[int, int]]:
    """Runs of descending `spans` with little padding; spans of 0 are a run of their own."""
    start = 0
    while start < spans.size:
        longest = int(spans[start])
        shortest = max(longest - longest // 8 - _SLACK, 1) if longest else 0
        stop = int(np.searchsorted(-spans, -shortest, side="right"))
        yield start, stop
        start = stop


def _to(device: torch.device, array: _Ints) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
