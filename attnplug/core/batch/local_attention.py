"""Chunked local attention as ordinary causal attention over virtual requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from attnplug.core.arguments import Shape, instance, one_of
from attnplug.core.batch.host import IntArray, check_count, exact_seq_lens, query_spans, to_device
from attnplug.core.errors import BatchError
from attnplug.core.metadata import CommonAttentionMetadata

_TABLE = Shape("R M: integers")


def make_local_attention_virtual_batches(
    attn_chunk_size: int, common_attn_metadata: CommonAttentionMetadata, block_size: int
) -> tuple[CommonAttentionMetadata, Callable[[torch.Tensor], torch.Tensor]]:
    """Each request cut where its positions cross a multiple of the chunk, as a batch of the pieces.

    A piece has the queries of one chunk, keys from the chunk's start to the piece's last position,
    and the chunk's pages. Tokens keep their places, so queries and outputs are used as they are. A
    request without new tokens stays, as one piece without queries. Multimodal spans are left out: one that
    crosses a chunk's end has keys in two pieces, so layers with mm_prefix cannot be served this way.
    So is the selection of sparse layers, whose positions count from the request's start.

    Args:
        attn_chunk_size: positions per chunk; a multiple of `block_size`.
        common_attn_metadata: the batch, its lengths known to the host.
        block_size: tokens per KV page.

    Returns:
        The batch of V pieces, with a table `[V, attn_chunk_size / block_size]`, and a function. The function
        makes such a table from the `[R, max_blocks]` of another KV group of the same batch.
        Pages past a table's width repeat its last.

    Raises:
        BatchError: sizes that do not divide; lengths that are ragged, negative or not known to the host; a table
            without one row per request; keys that do not come from pages.
    """
    common = one_of(CommonAttentionMetadata)("common_attn_metadata", common_attn_metadata)
    _check_sizes(attn_chunk_size, block_size)
    if common.key_start_loc is not None:
        raise BatchError("key_start_loc", "given", "must be None: pieces find their keys in pages")
    starts, query_lens = query_spans(common)
    seq_lens = exact_seq_lens(common, query_lens, keyless=True)
    pieces = _cut(attn_chunk_size, starts, query_lens, seq_lens)
    device = common.query_start_loc.device
    table = _PieceTable(pieces, common.num_reqs, attn_chunk_size // block_size)

    query_start_loc_cpu = torch.from_numpy(pieces.starts)
    seq_lens_cpu = torch.from_numpy(pieces.seq_lens)
    batch = CommonAttentionMetadata(
        query_start_loc=to_device(pieces.starts, device),
        query_start_loc_cpu=query_start_loc_cpu,
        seq_lens=to_device(pieces.seq_lens, device),
        num_reqs=pieces.seq_lens.shape[0],
        num_actual_tokens=common.num_actual_tokens,
        max_query_len=int(pieces.query_lens.max(initial=0)),
        max_seq_len=int(pieces.seq_lens.max(initial=0)),
        block_table_tensor=table(common.block_table_tensor),
        slot_mapping=common.slot_mapping,
        causal=True,
        logits_indices_padded=common.logits_indices_padded,
        num_logits_indices=common.num_logits_indices,
        seq_lens_host=pieces.seq_lens,
        _seq_lens_cpu=seq_lens_cpu,
        _num_computed_tokens_cpu=torch.from_numpy(pieces.seq_lens - pieces.query_lens),
    )
    return batch, table


class _Pieces(NamedTuple):
    """V pieces of R requests."""

    starts: IntArray
    """Query start locations, int32 `[V + 1]`."""
    query_lens: IntArray
    seq_lens: IntArray
    """Keys from the chunk's start to the piece's last position, int32 `[V]`."""
    rows: IntArray | None
    """The request of each piece; None where every request is one piece."""
    chunks: IntArray
    """The chunk of each piece, counted from the request's first position."""


def _cut(chunk: int, starts: IntArray, query_lens: IntArray, seq_lens: IntArray) -> _Pieces:
    computed = seq_lens - query_lens
    last_chunk = np.maximum(seq_lens - 1, 0) // chunk
    # Without keys, positions begin before 0.
    first_chunk = np.minimum(np.maximum(computed, 0) // chunk, last_chunk)
    extra = last_chunk - first_chunk
    if not extra.any():
        keys = (seq_lens - first_chunk * chunk).astype(np.int32, copy=False)
        return _Pieces(starts.astype(np.int32), query_lens, keys, None, first_chunk)
    ends = (extra + 1).cumsum()
    rows = np.repeat(np.arange(len(ends)), extra + 1)
    # A request's pieces count up to its last chunk.
    chunks = np.arange(ends[-1]) + (last_chunk + 1 - ends)[rows]
    chunk_starts = chunks * chunk
    begin = np.where(chunks == first_chunk[rows], computed[rows], chunk_starts)
    end = np.minimum(chunk_starts + chunk, seq_lens[rows])
    cuts = np.empty(len(rows) + 1, dtype=np.int32)
    np.add(begin, (starts[:-1] - computed)[rows], out=cuts[:-1], casting="unsafe")
    cuts[-1] = starts[-1]
    return _Pieces(
        cuts,
        (end - begin).astype(np.int32),
        (end - chunk_starts).astype(np.int32),
        rows,
        chunks,
    )


class _PieceTable:
    """Maps a block table `[R, max_blocks]` to the pieces' pages `[V, pages]`, on the table's device."""

    def __init__(self, pieces: _Pieces, num_reqs: int, pages: int) -> None:
        self.num_reqs = num_reqs
        self.pages = pages
        self.rows = np.arange(num_reqs) if pieces.rows is None else pieces.rows
        self.first_pages = pieces.chunks.astype(np.int64) * pages
        self._on_device: tuple[torch.device, torch.Tensor, torch.Tensor] | None = None

    def __call__(self, block_table: torch.Tensor) -> torch.Tensor:
        """The pages of each piece.

        Raises:
            BatchError: not one row for each request of the batch that was cut, or no column.
        """
        instance("block_table", block_table, torch.Tensor)
        if block_table.ndim != 2 or block_table.shape[0] != self.num_reqs or not block_table.shape[1]:
            found = tuple(block_table.shape)
            raise BatchError("block_table", found, f"must be of shape ({self.num_reqs}, max_blocks)")
        _TABLE.check("block_table", block_table, {})
        last = block_table.shape[1] - 1
        if block_table.device.type == "cpu":
            columns = self.first_pages[:, None] + np.arange(self.pages)
            np.minimum(columns, last, out=columns)
            return torch.from_numpy(_gather(block_table.numpy(), self.rows, columns))
        rows, first_pages = self._indices(block_table.device)
        steps = torch.arange(self.pages, device=block_table.device)
        return block_table[rows[:, None], (first_pages[:, None] + steps).clamp_(max=last)]

    def _indices(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        # Kept, because all KV groups of a step need the same indices.
        if self._on_device is None or self._on_device[0] != device:
            rows, first_pages = to_device(np.stack([self.rows, self.first_pages]), device)
            self._on_device = device, rows, first_pages
        return self._on_device[1:]


def _gather(table: IntArray, rows: IntArray, columns: IntArray) -> IntArray:
    if not table.flags.c_contiguous:
        return table[rows[:, None], columns]
    columns += (rows * table.shape[1])[:, None]
    return table.take(columns)  # twice as fast as indexing with two arrays


def _check_sizes(attn_chunk_size: int, block_size: int) -> None:
    check_count("block_size", block_size, 1)
    check_count("attn_chunk_size", attn_chunk_size, 1)
    if attn_chunk_size % block_size:
        limit = f"must be a multiple of block_size={block_size}: a chunk begins at a page"
        raise BatchError("attn_chunk_size", attn_chunk_size, limit)
