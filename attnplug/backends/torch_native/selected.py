"""Sparse layers: each query attends the keys that an indexer picked for it, as a request of its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from attnplug.backends.torch_native.decode import Gatherer, attend_tiles
from attnplug.backends.torch_native.dense import Scoring
from attnplug.backends.torch_native.metadata import TorchMetadata
from attnplug.backends.torch_native.source import KeySource, Tile, buckets
from attnplug.core.errors import BatchError
from attnplug.core.selection import Selection
from attnplug.core.sparse import SparseSpec
from attnplug.ops.reach import Reach
from attnplug.ops.selection import chosen_keys

_Ints = npt.NDArray[np.int64]

_POSITIONS = 1 << 21
"""Chosen positions that are sorted and located at once."""


def attend_selected(
    query: torch.Tensor,
    source: KeySource,
    sparse: SparseSpec,
    metadata: TorchMetadata,
    reach: Reach,
    causal: bool,
    scoring: Scoring,
    output: torch.Tensor,
    output_lse: torch.Tensor | None,
) -> None:
    """Attend every query of the step over its chosen keys, in float32.

    The selection is read in this call, so layers of one step share no plan.

    Args:
        query: `[T, H, D]`.
        source: the keys.
        sparse: of the layer.
        metadata: the step, with a selection.
        reach: the keys that the layer's mask shows to a query.
        causal: whether the layer is causal in this step.
        scoring: turns scores into weights.
        output: `[T, H, Dv]`, written.
        output_lse: float32 `[T, H]`, written; None without.

    Raises:
        BatchError: the step has no selection, or one of too few rows; on a CPU also for values that are not
            given or not allowed.
    """
    if metadata.selection is None:
        remedy = "give CommonAttentionMetadata.selection; the model's indexer fills it before the layer runs"
        raise BatchError("selection", None, f"is required: the layer is sparse {sparse}", remedy)
    rows = slice(*metadata.query_starts[[0, -1]].tolist())
    metadata.selection.check_size(rows.stop)
    selection = metadata.selection[rows]
    requests, positions = metadata.rows()
    spans = None if metadata.spans is None else metadata.spans[rows]
    if query.device.type == "cpu":
        ends = metadata.seq_lens[requests]
        if causal:
            # Keys that only a window or chunk hides may be chosen.
            _, ends = Reach(-1, 0, 0, reach.spans).bounds(positions, 0 * ends, ends, spans)
        selection.check_values(sparse, torch.from_numpy(ends))
    low, high = reach.bounds(positions, source.first[requests], source.end[requests], spans)
    gatherer = Gatherer(source, query.device)
    count = max(_POSITIONS // max(selection.positions.shape[1] * sparse.block, 1), 1)
    for start in range(0, requests.size, count):
        part = slice(start, start + count)
        at = tuple(
            torch.from_numpy(np.array(each[part])).to(query.device)
            for each in (requests, positions, low, high)
        )
        tiles = list(_tiles(selection[part], sparse, at, rows.start + start, source, gatherer))
        attend_tiles(query, tiles, gatherer, scoring, output, output_lse)


def _tiles(
    selection: Selection,
    sparse: SparseSpec,
    at: tuple[torch.Tensor, ...],
    first_row: int,
    source: KeySource,
    gatherer: Gatherer,
) -> Iterator[Tile]:
    """Tiles of single queries, those with most keys first."""
    # This order keeps padding small, because a tile is as long as its longest query needs.
    requests, positions, low, high = at
    keys, counts = chosen_keys(selection, sparse, low, high)
    spans, order = counts.sort(descending=True, stable=True)
    sizes: _Ints = spans.cpu().numpy()
    for begin, end in buckets(sizes):
        length = int(sizes[begin])
        step = max(gatherer.tile_tokens // max(length, 1), 1)
        for start in range(begin, end, step):
            taken = order[start : min(start + step, end)]
            places, lengths = keys[taken, :length], counts[taken, None]
            axis = torch.arange(length, device=taken.device)
            # Padding repeats the last key, because another place of the cache may hold NaN.
            if length:
                places = places.gather(1, axis.minimum(lengths - 1))
            block, offset = source.locate(requests[taken], places)
            by_key, by_value = gatherer.k.steps, gatherer.v.steps
            hidden = None if length == int(sizes[min(start + step, end) - 1]) else axis >= lengths
            yield Tile(
                taken + first_row,
                block * by_key[0] + offset * by_key[1],
                block * by_value[0] + offset * by_value[1],
                None if hidden is None else hidden[:, None],
                positions[taken, None],
                length == 0,
                places,
            )
