"""Short queries of many requests at once: decode, speculative verification, short extends.

One new token over a few hundred keys on a CPU: gathers whole pages into a buffer that fits the CPU's cache.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from attnplug.backends.torch_native.dense import Scoring
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.backends.torch_native.source import HeadRows, KeySource, PagedKeys, Tile, plan_tiles
from attnplug.ops.reach import Reach

SHORT_QUERY = 16
"""The longest query attended together with others."""

# Float32 bytes of a tile's keys; on a CPU few enough to stay in its cache.
_TILE_BYTES_CPU = 1 << 23
_TILE_BYTES_DEVICE = 1 << 26


def attend_short(
    query: torch.Tensor,
    requests: npt.NDArray[np.int64],
    source: KeySource,
    metadata: TorchMetadata,
    reach: Reach,
    scoring: Scoring,
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
) -> None:
    """Attend every query of `requests`, tile by tile, in float32.

    Args:
        query: `[T, H, D]`.
        requests: host int64, indices of requests with at least one query.
        source: their keys.
        metadata: the step, which keeps the plan for its other layers.
        reach: the keys that a query sees.
        scoring: turns scores into weights.
        output: `[T, H, Dv]`, written in the rows of `requests`.
        output_lse: float32 `[T, H]`, written in the same rows; None without.
    """
    gatherer = Gatherer(source, query.device)
    steps, tokens = (gatherer.k.steps, gatherer.v.steps), gatherer.tile_tokens
    # The requests are part of the key, because for some layers `attend_pages` attends a few of them.
    key = (requests.tobytes(), type(source), source.k.shape[1], steps, reach, tokens)
    tiles = metadata.plans.get(key)
    if tiles is None:
        tiles = plan_tiles(metadata, requests, source, steps, reach, tokens, query.device)
        metadata.plans[key] = tiles
    attend_tiles(query, tiles, gatherer, scoring, output, output_lse)


class Gatherer:
    """Gathers keys, then values, into one buffer small enough to stay in the CPU's cache."""

    def __init__(self, source: KeySource, device: torch.device) -> None:
        self.k, self.v = HeadRows.of(source.k), HeadRows.of(source.v)
        self.heads = source.k.shape[2]
        self.sizes = source.k.shape[3], source.v.shape[3]
        self._token = self.heads * max(self.sizes)
        budget = _TILE_BYTES_CPU if device.type == "cpu" else _TILE_BYTES_DEVICE
        self.tile_tokens = max(budget // (4 * self._token), 1)
        self._stored = self.k.rows.new_empty(0)
        self._wide: torch.Tensor | None = None

    def reserve(self, tiles: list[Tile]) -> None:
        """Make the buffer large enough for any of `tiles`."""
        tokens = max(tile.keys.shape[0] * min(tile.keys.shape[1], self.tile_tokens) for tile in tiles)
        self._stored = self.k.rows.new_empty(tokens * self._token)
        if self.k.dtype != torch.float32:
            self._wide = self._stored.new_empty(tokens * self._token, dtype=torch.float32)

    def indices(self, tile: Tile) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[B, Hkv, L]` of the tile's keys and values; one tensor where they are the same."""
        keys = self.k.index(tile.keys, self.heads)
        same = self.k.steps == self.v.steps
        return keys, keys if same else self.v.index(tile.values, self.heads)

    def gather(self, rows: HeadRows, index: torch.Tensor) -> torch.Tensor:
        """Float32 `[B * Hkv, L, D]`, valid until the next call."""
        picked = rows.gather(index, self._stored).flatten(0, 1)
        if self._wide is None:
            return picked
        return self._wide[: picked.numel()].view_as(picked).copy_(picked)


def attend_tiles(
    query: torch.Tensor,
    tiles: list[Tile],
    gatherer: Gatherer,
    scoring: Scoring,
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
) -> None:
    """Attend the queries `[T, H, D]` of `tiles`, and write their rows of `output` and of a given `output_lse`."""
    gatherer.reserve(tiles)
    for tile in tiles:
        grouped = query.index_select(0, tile.queries).float()
        out, lse = _attend_tile(grouped, tile, gatherer, scoring, output_lse is not None)
        output.index_copy_(0, tile.queries, out.to(output.dtype))
        if output_lse is not None and lse is not None:
            output_lse.index_copy_(0, tile.queries, lse)


def _attend_tile(
    query: torch.Tensor, tile: Tile, gatherer: Gatherer, scoring: Scoring, wants_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output `[B * q, H, Dv]` and LSE `[B * q, H]` of queries `[B * q, H, D]`."""
    (batch, queries), length = tile.query_places.shape, tile.keys.shape[1]
    heads, size = query.shape[1:]
    kv_heads, size_v = gatherer.heads, gatherer.sizes[1]
    if length == 0:
        out = query.new_empty(batch * queries, heads, size_v)
        empty_lse = query.new_empty(batch * queries, heads) if wants_lse else None
        scoring.fill_empty(out, empty_lse)
        return out, empty_lse

    groups = heads // kv_heads
    split = query.mul_(scoring.scale).view(batch, queries, kv_heads, groups, size)
    split = split.permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, groups * queries, size)
    key_index, value_index = gatherer.indices(tile)
    pieces = [
        slice(start, min(start + gatherer.tile_tokens, length))
        for start in range(0, length, gatherer.tile_tokens)
    ]
    scores = query.new_empty(batch * kv_heads, groups * queries, length)
    for piece in pieces:
        keys = gatherer.gather(gatherer.k, key_index[:, :, piece])
        scores[:, :, piece] = torch.bmm(split, keys.transpose(1, 2))
    shaped = scores.view(batch, kv_heads, groups, queries, length)
    distance = None
    if scoring.slopes is not None:
        axis = torch.arange(length, device=tile.keys.device)
        places = axis if tile.key_places is None else tile.key_places[:, None]
        distance = (places - tile.query_places[:, :, None]).abs_().float()
    scoring.shape(shaped, distance, tile.hidden)
    weights, lse = scoring.normalise(shaped, wants_lse, tile.has_empty_rows)
    weights = weights.view_as(scores)
    out = query.new_zeros(batch * kv_heads, groups * queries, size_v)
    for piece in pieces:
        out.baddbmm_(weights[:, :, piece], gatherer.gather(gatherer.v, value_index[:, :, piece]))
    out = scoring.scale_values(out.view(batch, kv_heads, groups, queries, size_v)).permute(0, 3, 1, 2, 4)
    if lse is not None:
        lse = lse.permute(0, 3, 1, 2).reshape(batch * queries, heads)
    return out.reshape(batch * queries, heads, size_v), lse


# Bytes of a request's K and V below which a share of a tile costs less than calls of its own.
_MIN_BYTES = 1 << 17
# Largest buffer: more bytes would leave the cache between the gather and their use.
_MAX_BYTES = 1 << 22


@dataclasses.dataclass(frozen=True, slots=True)
class _PageRows:
    """A cache as rows of one page each: block b is row `b * step` for keys, `b * step + value` for values."""

    block_size: int
    heads: int
    head_size: int
    unit: int
    step: int
    value: int

    @classmethod
    def of(cls, source: PagedKeys) -> _PageRows | None:
        """None if K and V differ in shape or strides, or a page is not contiguous with heads innermost."""
        k, v = source.k, source.v
        if not len(k) or k.shape != v.shape or k.stride() != v.stride() or not k[0].is_contiguous():
            return None
        apart = v.storage_offset() - k.storage_offset()
        if apart < 0 or k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr():
            return None
        unit = math.gcd(k.stride(0), apart)
        block_size, heads, head_size = k.shape[1:]
        return cls(block_size, heads, head_size, unit, k.stride(0) // unit, apart // unit)

    def view(self, k: torch.Tensor) -> torch.Tensor:
        """The rows of a cache whose keys are `k`."""
        count = (k.shape[0] - 1) * self.step + self.value + 1
        return k.as_strided((count, k[0].numel()), (self.unit, 1))


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PageDecodes:
    """The requests of a step that attend whole pages; its layers share plan and buffer.

    Args:
        chosen: bool `[R]`.
        queries: int64, their rows of the packed queries.
        pages: the view of the cache.
        parts: per request: rows of its pages, their place in the buffer, and its keys and values there.
    """

    chosen: npt.NDArray[np.bool_]
    queries: torch.Tensor
    pages: _PageRows
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]


def plan_page_decodes(
    query: torch.Tensor, source: KeySource, metadata: TorchMetadata, reach: Reach, scoring: Scoring
) -> PageDecodes | None:
    """The requests for `attend_pages`; None if it cannot attend this layer, or no request would gain.

    It attends a plain softmax of scaled scores over a cache of the queries' own dtype.
    """
    if query.device.type != "cpu" or not isinstance(source, PagedKeys) or not scoring.is_plain:
        return None
    pages = _PageRows.of(source)
    if pages is None or source.k.dtype != query.dtype:
        return None
    key = (PageDecodes, pages, reach)
    if key not in metadata.plans:
        metadata.plans[key] = _plan(source, metadata, reach, pages)
    plan: PageDecodes | None = metadata.plans[key]
    return plan


def attend_pages(
    query: torch.Tensor, source: KeySource, plan: PageDecodes, scoring: Scoring, output: torch.Tensor
) -> None:
    """Attend the queries `[T, H, D]` of the plan's requests, and write their rows of `output [T, H, D]`."""
    rows = plan.pages.view(source.k)
    # Heads of a group become queries of one head, which reads their keys once.
    queries = query[plan.queries].view(len(plan.parts), 1, plan.pages.heads, -1, plan.pages.head_size)
    attended = []
    for one, (index, place, keys, values) in zip(queries.unbind(), plan.parts, strict=True):
        torch.index_select(rows, 0, index, out=place)
        attended.append(scaled_dot_product_attention(one, keys, values, scale=scoring.scale))
    rows_of = torch.cat(attended).view(-1, *output.shape[1:])
    output.index_copy_(0, plan.queries, rows_of.to(output.dtype))


def _plan(source: PagedKeys, metadata: TorchMetadata, reach: Reach, pages: _PageRows) -> PageDecodes | None:
    is_single = metadata.query_lens == 1
    spans = None
    if metadata.spans is not None and len(metadata.spans):
        # Rows of other requests are not read below, but must be rows.
        spans = metadata.spans[np.minimum(metadata.query_starts[:-1], len(metadata.spans) - 1)]
    low, high = reach.bounds(metadata.seq_lens - 1, source.first, source.end, spans)
    seen = (high - low) * 2 * source.k[0, 0].nbytes
    chosen = is_single & (seen >= _MIN_BYTES) & (seen <= _MAX_BYTES)
    if not chosen.any():
        return None
    low, high, size = low[chosen], high[chosen], pages.block_size
    first, last = low // size, -(-high // size)
    buffer = source.k.new_empty(2 * int((last - first).max()), source.k[0].numel())
    tables = source.block_table[torch.from_numpy(np.flatnonzero(chosen))].long() * pages.step
    bounds = np.stack([first, last, low - first * size, high - first * size], 1).tolist()
    parts = []
    for table, (start, stop, begin, end) in zip(tables, bounds, strict=True):
        keys = table[start:stop]
        place = buffer[: 2 * keys.numel()]
        halves = place.view(2, 1, -1, pages.heads, pages.head_size)[:, :, begin:end].transpose(2, 3)
        parts.append((torch.cat([keys, keys + pages.value]), place, halves[0], halves[1]))
    return PageDecodes(chosen, torch.from_numpy(metadata.query_starts[:-1][chosen]), pages, parts)
