"""Padded `[B, H, L, D]` tensors as packed requests, and back; the batch metadata for backends."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.errors import BatchError
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.integrations.binding import direct_step
from attnplug.integrations.reader.mask_pattern import MaskPattern

_OWN_ROWS = "give each sequence a row of its own, padded"
_Bools: TypeAlias = npt.NDArray[np.bool_]
_Ints: TypeAlias = npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The tokens of `[B, H, L, D]`: the first `count` of each row, or those at `index`.

    `index` is (row, position), two int64 tensors `[T]` in order of requests.
    """

    count: int
    index: tuple[torch.Tensor, torch.Tensor] | None = None

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[T, H, D]` of `tensor [B, H, L, D]`; a view for one request without padding."""
        tokens = tensor.transpose(1, 2)
        return tokens[:, : self.count].flatten(0, 1) if self.index is None else tokens[self.index]

    def unpack(self, packed: torch.Tensor, batch: int) -> torch.Tensor:
        """`[B, L, H, D]` of `packed [T, H, D]`, contiguous, with zeros for padding."""
        if self.index is None:
            return packed.view(batch, self.count, *packed.shape[1:])
        rows = packed.new_zeros(batch, self.count, *packed.shape[1:])
        rows[self.index] = packed
        return rows


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """The batch of one step: rows of its queries and keys, and the metadata for backends."""

    queries: Rows
    keys: Rows
    common: CommonAttentionMetadata


def pack_all(
    batch: int, q_length: int, kv_length: int, kv_offset: int, padding: _Bools | None, device: torch.device
) -> Packing:
    """Cross attention: every query sees all keys that are tokens. BatchError: a padding mask of another batch size."""
    real = None
    if padding is not None:
        _check_rows(padding, batch)
        real = np.zeros((batch, kv_length), dtype=np.bool_)
        given = padding[:, kv_offset : kv_offset + kv_length]
        real[:, : given.shape[1]] = given
    keys, key_lens = _rows(real, batch, kv_length, device)
    query_lens = np.full(batch, q_length, dtype=np.int32)
    common = direct_step(query_lens, key_lens, key_lens, False, device)
    return Packing(Rows(q_length), keys, common)


def pack_real(
    pattern: MaskPattern,
    batch: int,
    queries: range,
    keys: range,
    padding: _Bools | None,
    left_padding: npt.NDArray[np.int64] | None,
    device: torch.device,
    spans: npt.NDArray[np.int64] | None = None,
) -> Packing:
    """Self-attention: the queries are the last tokens of each request.

    `queries` and `keys` are positions that count padding. Keys past the last query, at the unused end of a
    static cache, are dropped. `spans` are positions too, int64 `[B, queries, 2]`.

    Raises:
        BatchError: a mask that does not cover the sequence; under a window or chunks, padding between the tokens
            of a row; or chunks that do not begin at a row's first token.
    """
    end = queries.stop
    if keys.start > queries.start or keys.stop < end:
        raise BatchError("key", f"positions {keys}", f"must cover the queries' positions {queries}")
    if padding is not None:
        _check_rows(padding, batch)
        if padding.shape[1] < end:
            limit = f"must cover all {end} positions, including those in the cache"
            raise BatchError("attention_mask", padding.shape, limit, "extend it with each step")
    if padding is None or bool(padding[:, :end].all()):
        if left_padding is not None and left_padding.any():
            raise _chunks_elsewhere(left_padding)
        query_lens = np.full(batch, len(queries), dtype=np.int32)
        seq_lens = np.full(batch, end, dtype=np.int32)
        common = direct_step(query_lens, seq_lens, seq_lens - keys.start, pattern.causal, device, spans)
        return Packing(Rows(len(queries)), Rows(end - keys.start), common)
    real = padding[:, :end]
    if pattern.window[0] >= 0 or pattern.window[1] > 0 or pattern.chunk_size is not None:
        # Packing removes padding, which would change the distances if it lay between tokens.
        _check_unbroken(real)
    if pattern.chunk_size is not None:
        first = real.argmax(axis=1)
        if left_padding is None or (left_padding != first)[real.any(axis=1)].any():
            raise _chunks_elsewhere(left_padding)
    query_rows, query_lens = _rows(real[:, queries.start :], batch, len(queries), device)
    key_rows, key_lens = _rows(real[:, keys.start :], batch, len(keys), device)
    seq_lens = real.sum(axis=1, dtype=np.int32)
    if spans is not None:
        # Positions of tokens do not count padding.
        before = np.concatenate([np.zeros((batch, 1), dtype=np.int64), real.cumsum(axis=1)], axis=1)
        spans = np.take_along_axis(before[:, :, None], spans, axis=1)[real[:, queries.start :]]
    common = direct_step(query_lens, seq_lens, key_lens, pattern.causal, device, spans)
    return Packing(query_rows, key_rows, common)


def pack_segments(
    pattern: MaskPattern,
    segments: npt.NDArray[np.int64],
    device: torch.device,
    spans: npt.NDArray[np.int64] | None = None,
) -> Packing:
    """Self-attention of packed rows without padding: each run of one number in `segments [B, L]` is a request.

    Raises:
        BatchError: chunks, which transformers counts from the row's first token, would divide a sequence
            elsewhere than they divide it in a row of its own.
    """
    batch, count = segments.shape
    begins = np.ones((batch, count), dtype=np.bool_)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    starts = np.append(np.flatnonzero(begins), batch * count)
    lengths = np.diff(starts).astype(np.int32)
    size = pattern.chunk_size
    if size is not None:
        first = starts[:-1] % count % size
        moved = (first > 0) & (first + lengths > size)
        if moved.any():
            place = int(starts[moved.argmax()] % count)
            limit = f"must be a multiple of chunk_size={size}: chunks are counted from the row's first token"
            raise BatchError("position_ids", f"a sequence that begins at token {place}", limit, _OWN_ROWS)
    if spans is not None:
        # Positions are counted from the first token of each sequence.
        firsts = np.repeat(starts[:-1] % count, lengths)[:, None]
        flat = spans.reshape(-1, 2)
        spans = np.where(flat[:, 1:] > flat[:, :1], flat - firsts, 0)
    common = direct_step(lengths, lengths, lengths, pattern.causal, device, spans)
    return Packing(Rows(count), Rows(count), common)


def _rows(real: _Bools | None, batch: int, count: int, device: torch.device) -> tuple[Rows, _Ints]:
    if real is None or (real.shape[1] == count and bool(real.all())):
        return Rows(count), np.full(batch, count, dtype=np.int32)
    row, place = (torch.from_numpy(part).to(device) for part in np.nonzero(real))
    return Rows(count, (row, place)), real.sum(axis=1, dtype=np.int32)


def _check_rows(padding: _Bools, batch: int) -> None:
    if padding.ndim != 2 or padding.shape[0] != batch:
        raise BatchError("attention_mask", padding.shape, f"must have one row for each of {batch} sequences")


def _check_unbroken(real: _Bools) -> None:
    edges = np.diff(real.astype(np.int8), axis=1, prepend=0, append=0)
    broken = (edges == 1).sum(axis=1) > 1
    if broken.any():
        row = int(broken.argmax())
        runs = int((edges[row] == 1).sum())
        limit = "must be one run: distances in a window or chunk count every position"
        remedy = "pad at the left or right of each row only, or use attn_implementation='eager'"
        raise BatchError("attention_mask", f"{runs} runs of tokens in row {row}", limit, remedy)


def _chunks_elsewhere(left_padding: npt.NDArray[np.int64] | None) -> BatchError:
    found = None if left_padding is None else left_padding.tolist()
    return BatchError("left_padding", found, "must be the first token of each row, where its chunks begin")
