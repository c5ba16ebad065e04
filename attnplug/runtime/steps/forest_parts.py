"""The ordinary batches that a step with shared prefixes or draft trees consists of, and the lists that merge them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.runtime.batch.draft_trees import DraftTree, TreeShape
from attnplug.runtime.batch.engine_values import Ints
from attnplug.runtime.batch.forest import Node, first_seen
from attnplug.runtime.batch.step_batch import HostRows

_Table = npt.NDArray[np.int32]


ARRAYS_OF_ROWS = 4
"""Arrays that the device needs of one ordinary batch."""


class Rows(NamedTuple):
    """One ordinary batch on the host: its requests, and the rows of the step that are their queries.

    Args:
        rows: int64 `[n]`, rows of the step in the order of the requests; -1 for padding.
        counts: int64 `[r]`, queries of each request.
        lengths: int64 `[r]`, tokens of each request.
        table: int32 `[r, blocks]`; for the rest of requests int64 `[r, 2]`, the row of the step's table and the first of its
            blocks, because that table is on the device already.
        is_rest: whether `table` is of the rest.
    """

    rows: Ints
    counts: Ints
    lengths: Ints
    table: npt.NDArray[Any]
    is_rest: bool = False

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """What the device needs: query starts, lengths, the table, and the rows."""
        starts = starts_of(self.counts)
        rows = np.maximum(self.rows, 0)
        return starts.astype(np.int32), self.lengths.astype(np.int32), self.table, rows

    def common(
        self,
        sent: Sequence[torch.Tensor],
        no_slots: torch.Tensor,
        size: int,
        step_table: torch.Tensor,
        causal: bool,
        cut: CutTable | None = None,
        longest: int | None = None,
    ) -> CommonAttentionMetadata:
        """The batch for a builder, which writes nothing.

        Args:
            sent: `arrays()` on the device.
            no_slots: int64, -1 for each row.
            size: tokens of a block.
            step_table: int32 `[R, max_blocks]`, of the step on the device.
            causal: of the layers.
            cut: where the table of the rest is written, of all requests in order; None for a new tensor.
            longest: tokens of the longest request that a graph serves, for its capture; None for a step.
        """
        starts, lens, table, _ = sent
        lengths, count = self.lengths.astype(np.int32), int(self.rows.size)
        if longest is not None:
            # Values that builders derive from lengths must fit each replay.
            lengths = np.full_like(lengths, longest)
        if self.is_rest:
            width, rows = width_of(self.lengths, size), table[:, :1]
            if cut is None:
                table = step_table[rows, _columns(table, width, step_table.shape[1])]
            else:
                table = cut.filled(step_table, table, width)
        keys: dict[str, Any] = {}
        if not causal:
            keys = {"encoder_seq_lens": lens, "encoder_seq_lens_cpu": lengths}
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=torch.from_numpy(starts_of(self.counts).astype(np.int32)),
            seq_lens=lens,
            num_reqs=lengths.size,
            num_actual_tokens=count,
            max_query_len=int(self.counts.max(initial=0)),
            max_seq_len=int(lengths.max(initial=0)),
            block_table_tensor=table,
            slot_mapping=no_slots[:count],
            seq_lens_host=lengths,
            seq_lens_host_exact=longest is None,
            causal=causal,
            **keys,
        )


def width_of(lengths: Ints, size: int) -> int:
    """The columns of a table for requests of these lengths: a power of two, because kernels are bound by its stride."""
    blocks = -(-int(lengths.max(initial=0)) // size)
    return max(1 << (blocks - 1).bit_length(), 16) if blocks else 16


def _columns(places: torch.Tensor, width: int, most: int) -> torch.Tensor:
    """The columns `[r, width]` of a table of `most` columns, for rests `places` as in `Rows`; the last for those past it."""
    return (places[:, 1:] + torch.arange(width, device=places.device)).clamp_(max=most - 1)


class CutTable(NotCopied):
    """The table of the rest of requests in memory that a graph reads, of which a step fills the columns that it needs.

    Args:
        table: int32 `[R, max_blocks]`; columns past the blocks of all requests have any numbers of blocks.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        self._columns: torch.Tensor | None = None

    def forget(self) -> None:
        """Let the next step have other `places`."""
        self._columns = None

    def filled(self, step_table: torch.Tensor, places: torch.Tensor, width: int) -> torch.Tensor:
        """The table of a step.

        Args:
            step_table: int32 `[R, max_blocks]`, of all blocks of the requests.
            places: int64 `[R, 2]` as in `Rows`, always the same between two calls of `forget`.
            width: the columns of the longest rest.
        """
        width = min(width, self._table.shape[1])
        if self._columns is None or self._columns.shape[1] < width:
            self._columns = _columns(places, width, step_table.shape[1])
        torch.gather(step_table, 1, self._columns, out=self._table[:, : self._columns.shape[1]])
        return self._table


def to_device(
    arrays: Sequence[npt.NDArray[Any]], device: torch.device, into: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The arrays on a device by one copy, without waiting for it; on a CPU their own memory.

    Args:
        arrays: int32 or int64.
        device: where to.
        into: uint8, the memory of what a graph reads, for arrays that always have the same shapes; None for new memory.
    """
    if device.type == "cpu" and into is None:
        return [torch.from_numpy(each) for each in arrays]
    begins = begins_of(arrays)
    staged = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=device.type != "cpu")
    held = staged.numpy()
    for each, begin in zip(arrays, begins, strict=False):
        held[begin : begin + each.nbytes] = np.ascontiguousarray(each).reshape(-1).view(np.uint8)
    sent = staged.to(device, non_blocking=True) if into is None else into.copy_(staged, non_blocking=True)
    return [
        sent[begin : begin + each.nbytes].view(_DTYPES[each.dtype]).view(each.shape)
        for each, begin in zip(arrays, begins, strict=False)
    ]


def begins_of(arrays: Sequence[npt.NDArray[Any]]) -> list[int]:
    """Where each array begins, and the end: multiples of 16 bytes, as kernels read them."""
    begins: list[int] = np.cumsum([0, *(-(-each.nbytes // 16) * 16 for each in arrays)]).tolist()
    return begins


_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


def starts_of(counts: Ints) -> Ints:
    """Where each of these counts of rows begins, and the end: int64 `[r + 1]`."""
    starts = np.zeros(counts.size + 1, dtype=np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def rows_of(readers: Ints, starts: Ints) -> Ints:
    """The rows of requests, one request after the other."""
    counts = starts[readers + 1] - starts[readers]
    offsets = starts[readers] - (np.cumsum(counts) - counts)
    rows: Ints = np.arange(int(counts.sum())) + np.repeat(offsets, counts)
    return rows


def rest_rows(host: HostRows, size: int, kept: Ints, is_tree: npt.NDArray[np.bool_]) -> Rows:
    """The requests without their first `kept` blocks, and without those of trees, which have no order."""
    starts = starts_of(host.scheduled)
    own = np.flatnonzero(~is_tree)
    counts, lengths = host.scheduled[own], (host.computed + host.scheduled - kept * size)[own]
    # A request without queries may have fewer tokens than blocks of a window that it has passed.
    lengths = np.maximum(lengths, counts)
    return Rows(rows_of(own, starts), counts, lengths, np.stack([own, kept[own]], 1), is_rest=True)


def piece_rows(
    host: HostRows,
    table: _Table,
    size: int,
    nodes: Sequence[Node],
    kept: Ints,
    trees: Mapping[int, DraftTree],
) -> Rows | None:
    """Shared blocks, of which their readers see all keys, and the contexts of trees; None without either."""
    starts = starts_of(host.scheduled)
    parts = [
        (node.readers, int(node.readers[0]), node.first, (node.last - node.first) * size) for node in nodes
    ]
    for request in trees:
        left = int(host.computed[request] - kept[request] * size)
        if left > 0:
            parts.append((np.array([request]), request, int(kept[request]), left))
    if not parts:
        return None
    # The rows of decodes are the requests themselves.
    is_decode = bool((host.scheduled == 1).all())
    rows = [readers if is_decode else rows_of(readers, starts) for readers, *_ in parts]
    # Builders with a threshold want short queries first.
    order = sorted(range(len(parts)), key=lambda part: rows[part].size)
    lengths = np.array([parts[part][3] for part in order])
    cut = np.zeros((len(parts), width_of(lengths, size)), dtype=np.int32)
    for line, part in zip(cut, order, strict=True):
        _, request, first, tokens = parts[part]
        blocks = -(-tokens // size)
        line[:blocks] = table[request, first : first + blocks]
    counts = np.array([rows[part].size for part in order])
    return Rows(np.concatenate([rows[part] for part in order]), counts, lengths, cut)


class Paths(NamedTuple):
    """The nodes of trees: each attends the keys of its path, and those of a cut block before.

    Args:
        rows: int64 `[n]`, rows of the step.
        starts: int32 `[n + 1]`, where the slots of each node begin.
        slots: int64, of all keys.
    """

    rows: Ints
    starts: npt.NDArray[np.int32]
    slots: Ints


def node_paths(
    host: HostRows,
    table: _Table,
    size: int,
    first: Ints,
    trees: Mapping[int, DraftTree],
    left: int = -1,
    chunk: int | None = None,
) -> Paths:
    """The paths of the nodes of trees.

    Args:
        host: the requests.
        table: int32 `[R, max_blocks]`, of the KV group.
        size: tokens of a block.
        first: int64 `[R]`, the first block that all nodes of a request see whole.
        trees: by request.
        left: keys of a window before the query; -1 for all.
        chunk: tokens of a chunk; None without.
    """
    starts, rows, slots, counts = starts_of(host.scheduled), list[Ints](), list[Ints](), list[Ints]()
    for request, tree in trees.items():
        context, shape = int(host.computed[request]), tree.shape
        places, lengths = shape.members + context, shape.counts
        lows = first_seen(shape.depths + context, left, chunk)
        border = min(int(first[request]) * size, context)
        if int(lows.max()) > context or border:
            places, lengths = _within(places, shape, context, lows, border)
        row = table[request].astype(np.int64)
        rows.append(np.arange(starts[request], starts[request + 1]))
        slots.append(row[places // size] * size + places % size)
        counts.append(lengths)
    ends = starts_of(np.concatenate(counts)).astype(np.int32)
    return Paths(np.concatenate(rows), ends, np.concatenate(slots))


def _within(places: Ints, shape: TreeShape, context: int, lows: Ints, border: int) -> tuple[Ints, Ints]:
    """The keys of each path that its node sees, after those from its lowest position up to `border`."""
    ends = np.cumsum(shape.counts)
    parts = []
    for node, (end, count, low) in enumerate(
        zip(ends.tolist(), shape.counts.tolist(), lows.tolist(), strict=True)
    ):
        # The path of a node has one token for each position.
        hidden = min(max(low - context, 0), int(shape.depths[node]))
        parts.append(np.concatenate([np.arange(low, border), places[end - count + hidden : end]]))
    return np.concatenate(parts), np.array([part.size for part in parts], dtype=np.int64)


def merge_lists(owned: Sequence[Ints], tokens: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """For `merge_rows`, of the rows of all parts: where the list of each of the step's rows begins, and the lists.

    Rows of padding, -1, come last, and are in no list.
    """
    owners = np.concatenate(owned)
    starts = starts_of(np.bincount(owners[owners >= 0], minlength=tokens))
    order = np.argsort(np.where(owners < 0, tokens, owners), kind="stable")
    return starts.astype(np.int32), order.astype(np.int32)


def uniform_pieces(pieces: Rows | None, most: int, each: int, width: int) -> Rows | None:
    """The pieces as `most` requests of `each` rows, the last of which are padding; None if they are more.

    A piece with more rows is several requests, and one with fewer has rows of padding.

    Args:
        pieces: from `piece_rows`; None for padding alone.
        most: requests.
        each: rows of each.
        width: columns of the table.
    """
    rows, lengths = np.full((most, each), -1, dtype=np.int64), np.ones(most, dtype=np.int64)
    table = np.zeros((most, width), dtype=np.int32)
    if pieces is not None:
        needed = -(-pieces.counts // each)
        if int(needed.sum()) > most:
            return None
        starts, line = starts_of(pieces.counts), 0
        for piece, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            for first in range(begin, end, each):
                last = min(first + each, end)
                rows[line, : last - first], lengths[line] = pieces.rows[first:last], pieces.lengths[piece]
                columns = min(width, pieces.table.shape[1])
                table[line, :columns] = pieces.table[piece, :columns]
                line += 1
    return Rows(rows.reshape(-1), np.full(most, each, dtype=np.int64), lengths, table)
