"""The keys of a batch: in pages, or packed in the tensors of the call.

Plans the tiles of short requests: the requests of each, and the rows of the cache to gather.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.core.errors import BatchError
from attnplug.core.spec import LayerSpec
from attnplug.ops.kv_codec import read_pages
from attnplug.ops.reach import Reach

_Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """`[num_blocks, block_size, Hkv, D]` of any strides, as rows of D elements that one index picks.

    Row `block * steps[0] + offset * steps[1] + head * steps[2]` is one head of one token. One flat index gathers a
    tile head by head, so that batched matrix products need no further copy.
    """

    rows: torch.Tensor
    steps: tuple[int, int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, pages: torch.Tensor) -> HeadRows:
        """The rows of `pages`; shares its storage."""
        blocks, block_size, heads, size = pages.shape
        dtype = pages.dtype
        if dtype.itemsize == 1:
            pages = pages.view(torch.uint8)
        # The stride of a dimension of one element has no meaning.
        outer = [pages.stride(dim) if pages.shape[dim] > 1 else 0 for dim in range(3)]
        unit = math.gcd(*outer) or 1
        block_step, offset_step, head_step = (stride // unit for stride in outer)
        last = (blocks - 1) * block_step + (block_size - 1) * offset_step + (heads - 1) * head_step
        count = last + 1 if blocks * block_size else 0
        rows = pages.as_strided((count, size), (unit, pages.stride(3)), pages.storage_offset())
        return cls(rows, (block_step, offset_step, head_step), dtype)

    def index(self, tokens: torch.Tensor, heads: int) -> torch.Tensor:
        """Rows `[B, heads, L]` of every head of `tokens [B, L]` (rows of their first heads)."""
        offsets = torch.arange(heads, device=tokens.device) * self.steps[2]
        return tokens[:, None] + offsets[:, None]

    def gather(self, index: torch.Tensor, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """`[*index.shape, D]` in the storage dtype, in `buffer` (flat, of `rows.dtype`) if given."""
        size = self.rows.shape[1]
        flat = index.reshape(-1)
        picked = None if buffer is None else buffer[: flat.numel() * size].view(-1, size)
        try:
            picked = torch.index_select(self.rows, 0, flat, out=picked)
        except IndexError:
            limit = "has a page that is no block of the cache"
            raise BatchError(
                "block_table_tensor", int(flat.max()), limit, "give blocks of the pool"
            ) from None
        return picked.view(self.dtype).view(*index.shape, size)


@dataclasses.dataclass(slots=True, eq=False)
class PagedKeys:
    """Keys in pages.

    Args:
        k: pages `[num_blocks, block_size, Hkv, D]`.
        v: pages `[num_blocks, block_size, Hkv, Dv]`.
        block_table: `[R, max_blocks]`; entries past a request's pages are not followed.
        end: lengths of the requests, host int64 `[R]`.
        start: the first position of every request.

    Raises:
        BatchError: a length that needs more pages than the table has columns.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    end: _Ints
    start: int = 0
    first: _Ints = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.first = np.full_like(self.end, self.start)
        held = self.block_table.shape[1] * self.k.shape[1]
        if self.end.size and int(self.end.max()) > held:
            limit = f"is past the {held} tokens of {self.block_table.shape[1]} pages per request"
            raise BatchError("seq_lens", int(self.end.max()), limit, "widen block_table_tensor")

    def locate(self, requests: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and offset, int64 `[B, L]`, of `positions [B, L]` in `requests [B]`."""
        block_size = self.k.shape[1]
        page = positions // block_size
        return self.block_table[requests[:, None], page].long(), positions - page * block_size

    def of_request(self, request: int, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[Hkv, high - low, D]` of positions `low .. high - 1`, gathered from the pages of one request."""
        device = self.block_table.device
        positions = torch.arange(low, high, device=device)[None]
        block, offset = self.locate(torch.tensor([request], device=device), positions)
        tensors = []
        for pages in (self.k, self.v):
            rows = HeadRows.of(pages)
            index = rows.index(block * rows.steps[0] + offset * rows.steps[1], pages.shape[2])
            tensors.append(rows.gather(index)[0])
        return tensors[0], tensors[1]

    def decoded(self, spec: LayerSpec, scales: tuple[float, float]) -> PagedKeys:
        """The same keys decoded to float32, of the blocks that the requests have, under other numbers.

        Raises:
            BatchError: a request has a block that is not in the cache.
        """
        table, size = self.block_table, self.k.shape[1]
        counts = -(-torch.from_numpy(self.end).to(table.device) // size)
        held = torch.arange(table.shape[1], device=table.device) < counts[:, None]
        # Tails of rows and padding requests may hold anything.
        blocks, places = torch.unique(table[: len(counts)][held].long(), return_inverse=True)
        compact = torch.zeros_like(table)
        compact[: len(counts)][held] = places.to(table.dtype)
        k, v = (
            read_pages(pages, blocks, spec, scale)
            for pages, scale in zip((self.k, self.v), scales, strict=True)
        )
        return PagedKeys(k, v, compact, self.end, self.start)


@dataclasses.dataclass(slots=True, eq=False)
class PackedKeys:
    """Keys given with the call, request after request.

    Args:
        key: `[Tk, Hkv, D]`.
        value: `[Tk, Hkv, Dv]`.
        starts: host int64 `[R + 1]`, where each request's keys start.
        end: lengths of the requests, host int64 `[R]`; the keys are the last ones.
    """

    key: torch.Tensor
    value: torch.Tensor
    starts: _Ints
    end: _Ints
    first: _Ints = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.first = self.end - np.diff(self.starts)

    @property
    def k(self) -> torch.Tensor:
        """Keys as one block."""
        return self.key[None]

    @property
    def v(self) -> torch.Tensor:
        """Values as one block."""
        return self.value[None]

    def locate(self, requests: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Block 0, and the row of each position."""
        shift = torch.from_numpy(self.starts[:-1] - self.first).to(positions.device)
        return torch.zeros_like(positions), positions + shift[requests][:, None]

    def of_request(self, request: int, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the keys and values of one request."""
        shift = int(self.starts[request] - self.first[request])
        rows = slice(low + shift, high + shift)
        return self.key[rows].transpose(0, 1), self.value[rows].transpose(0, 1)


KeySource: TypeAlias = PagedKeys | PackedKeys
"""K `[blocks, block_size, Hkv, D]` and V of R requests; request i has the positions `first[i] .. end[i] - 1`."""


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

    A tile has requests of one query length, longest first. A request longer than `tile_tokens` has a tile of its own,
    gathered in pieces. `steps` are those of the keys and of the values.
    """
    # A tile is as long as its longest request, so this order keeps padding small.
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
