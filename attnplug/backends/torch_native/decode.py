"""Short queries of many requests at once: decode, speculative verification, short extends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from attnplug.backends.torch_native.gather_plan import Tile, plan_tiles
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.backends.torch_native.softmax import Scoring
from attnplug.backends.torch_native.source import HeadRows, KeySource
from attnplug.ops.reach import Reach

SHORT_QUERY = 16
"""The longest query attended together with others."""

_TILE_BYTES_CPU = 1 << 23
_TILE_BYTES_DEVICE = 1 << 26
"""Float32 bytes of a tile's keys; on a CPU few enough to stay in its cache."""


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
    if scoring.value_scale != 1.0:
        out.mul_(scoring.value_scale)
    out = out.view(batch, kv_heads, groups, queries, size_v).permute(0, 3, 1, 2, 4)
    if lse is not None:
        lse = lse.permute(0, 3, 1, 2).reshape(batch * queries, heads)
    return out.reshape(batch * queries, heads, size_v), lse
