"""The ordinary batches that a step with shared prefixes or draft trees consists of, and the lists that merge them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.runtime.batch.draft_trees import DraftTree
from attnplug.runtime.batch.engine_values import Ints
from attnplug.runtime.batch.forest import Node, first_seen
from attnplug.runtime.batch.step_batch import HostRows

_Table = npt.NDArray[np.int32]


class Rows(NamedTuple):
    """One ordinary batch on the host: its requests, and the rows of the step that are their queries.

    Args:
        rows: int64 `[n]`, rows of the step in the order of the requests.
        counts: int64 `[r]`, queries of each request.
        lengths: int64 `[r]`, tokens of each request.
        table: int32 `[r, blocks]`; without columns where keys come with the call.
        slots: int64 `[sum of lengths]`, the slots of all keys, where they come with the call; None for pages.
    """

    rows: Ints
    counts: Ints
    lengths: Ints
    table: _Table
    slots: Ints | None = None

    def common(self, device: torch.device, causal: bool) -> CommonAttentionMetadata:
        """The batch for a builder. It writes nothing, so its slots are -1."""
        starts = starts_of(self.counts).astype(np.int32)
        lengths = self.lengths.astype(np.int32)
        starts_cpu, count = torch.from_numpy(starts), int(starts[-1])
        sent, lens = to_device(starts, device), to_device(lengths, device)
        keys: dict[str, Any] = {}
        if self.slots is not None:
            ends = starts_of(self.lengths).astype(np.int32)
            keys = {"key_start_loc": to_device(ends, device), "key_start_loc_cpu": torch.from_numpy(ends)}
        elif not causal:
            keys = {"encoder_seq_lens": lens, "encoder_seq_lens_cpu": lengths}
        return CommonAttentionMetadata(
            query_start_loc=sent,
            query_start_loc_cpu=starts_cpu,
            seq_lens=lens,
            num_reqs=lengths.size,
            num_actual_tokens=count,
            max_query_len=int(self.counts.max(initial=0)),
            max_seq_len=int(lengths.max(initial=0)),
            block_table_tensor=to_device(self.table, device),
            slot_mapping=torch.full((count,), PAD_SLOT_ID, dtype=torch.int64, device=device),
            seq_lens_host=lengths,
            causal=causal,
            **keys,
        )


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The values on a device, without waiting for it; on a CPU the array's own memory."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


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


def rest_rows(host: HostRows, table: _Table, size: int, kept: Ints, is_tree: npt.NDArray[np.bool_]) -> Rows:
    """The requests without their first `kept` blocks, and without those of trees, which have no order."""
    starts = starts_of(host.scheduled)
    own = np.flatnonzero(~is_tree)
    counts, lengths = host.scheduled[own], (host.computed + host.scheduled - kept * size)[own]
    # A request without queries may have fewer tokens than blocks of a window that it has passed.
    lengths = np.maximum(lengths, counts)
    width = max(int((-(-lengths // size)).max(initial=0)), 1)
    cut = np.zeros((own.size, width), dtype=np.int32)
    for first in np.unique(kept[own]).tolist():
        rows = np.flatnonzero(kept[own] == first)
        part = table[own[rows], first : first + width]
        cut[rows, : part.shape[1]] = part
    return Rows(rows_of(own, starts), counts, lengths, cut)


def piece_rows(
    host: HostRows, table: _Table, size: int, nodes: Sequence[Node], kept: Ints, trees: dict[int, DraftTree]
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
    rows = [rows_of(readers, starts) for readers, *_ in parts]
    # Builders with a threshold want short queries first.
    order = sorted(range(len(parts)), key=lambda part: rows[part].size)
    lengths = np.array([parts[part][3] for part in order])
    cut = np.zeros((len(parts), int((-(-lengths // size)).max())), dtype=np.int32)
    for line, part in zip(cut, order, strict=True):
        _, request, first, tokens = parts[part]
        blocks = -(-tokens // size)
        line[:blocks] = table[request, first : first + blocks]
    counts = np.array([rows[part].size for part in order])
    return Rows(np.concatenate([rows[part] for part in order]), counts, lengths, cut)


def node_rows(
    host: HostRows,
    table: _Table,
    size: int,
    first: Ints,
    trees: dict[int, DraftTree],
    left: int = -1,
    chunk: int | None = None,
) -> Rows:
    """The nodes of trees, each a request of one row: its keys are its path's, and those of a cut block before.

    Args:
        host: the requests.
        table: int32 `[R, max_blocks]`, of the KV group.
        size: tokens of a block.
        first: int64 `[R]`, the first block that all nodes of a request see whole.
        trees: by request.
        left: keys of a window before the query; -1 for all.
        chunk: tokens of a chunk; None without.
    """
    starts, rows, slots = starts_of(host.scheduled), list[Ints](), list[Ints]()
    for request, tree in trees.items():
        context = int(host.computed[request])
        row, positions = table[request].astype(np.int64), context + tree.depths
        lows = first_seen(positions, left, chunk).tolist()
        rows.append(np.arange(starts[request], starts[request + 1]))
        border = min(int(first[request]) * size, context)
        for low, path in zip(lows, tree.paths(), strict=True):
            seen = np.array(path)
            seen = seen[positions[seen] >= low] + context
            places = np.concatenate([np.arange(low, border), seen])
            slots.append(row[places // size] * size + places % size)
    lengths = np.array([each.size for each in slots])
    counts = np.ones(lengths.size, dtype=np.int64)
    none = np.zeros((lengths.size, 0), dtype=np.int32)
    return Rows(np.concatenate(rows), counts, lengths, none, np.concatenate(slots))


def merge_lists(parts: Sequence[Rows], tokens: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """For `merge_rows`: where the list of each of the step's rows begins, and the rows of all parts in these lists."""
    owners = np.concatenate([part.rows for part in parts])
    starts = starts_of(np.bincount(owners, minlength=tokens))
    return starts.astype(np.int32), np.argsort(owners, kind="stable").astype(np.int32)
