"""The requests in flight: their lengths and block tables, in arrays that steps are computed from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.errors import BatchError

__all__ = ["RequestTable"]

_Ints = npt.NDArray[np.int64]


class RequestTable:
    """Requests in order, each with its pages in every KV group.

    Implements the `input_batch` protocol of `reorder_batch_to_split_decodes_and_prefills`: `req_ids`,
    `num_computed_tokens_cpu`, `swap_states`. Takes what `StepBatchBuilder` takes.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_sizes: Sequence[int],
        device: torch.device | str = "cpu",
        cross_groups: Sequence[int] = (),
        max_encoder_len: int = 0,
    ) -> None:
        sizes = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "block_sizes": min(block_sizes, default=0),
        }
        for name, value in sizes.items():
            if value < 1:
                raise BatchError(name, value, "must be at least 1")
        self.device = torch.device(device)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.block_sizes = tuple(block_sizes)
        self.cross_groups = frozenset(cross_groups)
        groups = len(self.block_sizes)
        if not self.cross_groups <= set(range(groups)):
            raise BatchError(
                "cross_groups", sorted(self.cross_groups), f"must be indices of {groups} KV groups"
            )
        self._self_groups = [g for g in range(groups) if g not in self.cross_groups]
        lengths = [max_encoder_len if g in self.cross_groups else max_model_len for g in range(groups)]
        width = max(-(-length // size) for length, size in zip(lengths, self.block_sizes, strict=True))
        self._tables = np.zeros((groups, max_num_seqs, max(width, 1)), dtype=np.int32)
        self._flat_tables = self._tables.reshape(groups, -1)
        self._tables_cpu = torch.from_numpy(self._tables)
        self._num_blocks = np.zeros((groups, max_num_seqs), dtype=np.int64)
        self._capacity = np.zeros(max_num_seqs, dtype=np.int64)
        self._computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._encoder_lens = np.zeros(max_num_seqs, dtype=np.int32)
        self._encoder_written = np.zeros(max_num_seqs, dtype=bool)
        self._scheduled: _Ints = np.zeros(0, dtype=np.int64)
        self.req_ids: list[str] = []
        self._index: dict[str, int] = {}

    @property
    def num_reqs(self) -> int:
        """Requests in flight."""
        return len(self.req_ids)

    @property
    def num_computed_tokens_cpu(self) -> _Ints:
        """Tokens whose K and V are cached, int64 `[R]`; a view of the builder's own."""
        return self._computed[: self.num_reqs]

    def add_request(
        self,
        req_id: str,
        block_ids: Sequence[Sequence[int]] = (),
        num_computed_tokens: int = 0,
        encoder_len: int = 0,
    ) -> int:
        """Add a request at the end; gives its index.

        Args:
            req_id: its name.
            block_ids: its pages in each KV group.
            num_computed_tokens: tokens cached already, as by a shared prefix.
            encoder_len: encoder tokens that its cross-attention layers attend.

        Raises:
            BatchError: a name in use, no room, or counts that do not fit.
        """
        index = self.num_reqs
        if req_id in self._index:
            raise BatchError("req_id", req_id, "is in flight already")
        if index == self.max_num_seqs:
            raise BatchError("num_reqs", index + 1, f"must not pass max_num_seqs={self.max_num_seqs}")
        if not 0 <= num_computed_tokens < self.max_model_len:
            limit = f"must lie in 0 .. {self.max_model_len - 1}"
            raise BatchError("num_computed_tokens", num_computed_tokens, limit)
        if encoder_len < 0 or (encoder_len and not self.cross_groups):
            raise BatchError("encoder_len", encoder_len, "needs cross_groups, and must not be negative")
        self.req_ids.append(req_id)
        self._index[req_id] = index
        self._computed[index] = num_computed_tokens
        self._encoder_lens[index] = encoder_len
        self._encoder_written[index] = False
        self._num_blocks[:, index] = 0
        self._capacity[index] = 0 if self._self_groups else self.max_model_len
        try:
            if block_ids:
                self.append_blocks(req_id, block_ids)
        except BatchError:
            self.remove_request(req_id)
            raise
        return index

    def append_blocks(self, req_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """Give a request more pages: a sequence of block numbers for each KV group."""
        index = self._at(req_id)
        if len(block_ids) != len(self.block_sizes):
            raise BatchError(
                "block_ids",
                len(block_ids),
                f"must have one list for each of {len(self.block_sizes)} KV groups",
            )
        ends = self._num_blocks[:, index] + [len(ids) for ids in block_ids]
        if ends.max() > self._tables.shape[2]:
            raise BatchError(
                "block_ids", int(ends.max()), f"pages are past the table's {self._tables.shape[2]}"
            )
        for group, ids in enumerate(block_ids):
            if len(ids):
                self._tables[group, index, self._num_blocks[group, index] : ends[group]] = ids
        self._num_blocks[:, index] = ends
        held = [int(ends[group]) * self.block_sizes[group] for group in self._self_groups]
        self._capacity[index] = min(held, default=self.max_model_len)

    def remove_request(self, req_id: str) -> None:
        """Take a request out; the last one takes its place."""
        index, last = self._at(req_id), self.num_reqs - 1
        if index != last:
            self.swap_states(index, last)
        self.req_ids.pop()
        del self._index[req_id]

    def swap_states(self, i: int, j: int) -> None:
        """Exchange two requests."""
        for array in (self._computed, self._capacity, self._encoder_lens, self._encoder_written):
            array[[i, j]] = array[[j, i]]
        self._num_blocks[:, [i, j]] = self._num_blocks[:, [j, i]]
        width = int(self._num_blocks[:, [i, j]].max(initial=0))
        self._tables[:, [i, j], :width] = self._tables[:, [j, i], :width]
        self.req_ids[i], self.req_ids[j] = self.req_ids[j], self.req_ids[i]
        self._index[self.req_ids[i]], self._index[self.req_ids[j]] = i, j

    def _at(self, req_id: str) -> int:
        index = self._index.get(req_id)
        if index is None:
            raise BatchError("req_id", req_id, "is not in flight")
        return index
