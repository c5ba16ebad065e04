"""Refusals of a step that the requests in flight cannot run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from attnplug.core.errors import BatchError
from attnplug.runtime.batch.engine_values import Ints, first_attended
from attnplug.runtime.batch.requests import RequestTable


class CheckedRequests(RequestTable):
    """Requests that check a step before it changes anything."""

    def _check_counts(self, scheduled: Ints, largest: int) -> None:
        if scheduled.min(initial=0) < 0:
            worst = int(scheduled.argmin())
            limit = f"of request {self.req_ids[worst]} must not be negative"
            raise BatchError("num_scheduled_tokens", int(scheduled[worst]), limit)
        # Each within the limit keeps the sum from overflowing.
        total = largest if largest > self.max_num_batched_tokens else int(scheduled.sum())
        if total > self.max_num_batched_tokens:
            limit = f"in all must not pass max_num_batched_tokens={self.max_num_batched_tokens}"
            raise BatchError("num_scheduled_tokens", total, limit)

    def _check_lengths(self, lengths: Ints, longest: int) -> None:
        if longest > self.max_model_len:
            name = self.req_ids[int(lengths.argmax())]
            limit = f"of request {name} is past max_model_len={self.max_model_len}"
            raise BatchError("seq_len", longest, limit)
        if (lengths > self._capacity[: lengths.size]).any():
            self._refuse_short("seq_len", lengths, self._self_groups)

    def _check_encoder_pages(self, scheduled: Ints) -> None:
        lengths = np.where(scheduled > 0, self._encoder_lens[: scheduled.size], 0)
        self._refuse_short("encoder_len", lengths, self.cross_groups)

    def _check_null_blocks(self, scheduled: Ints, lengths: Ints) -> None:
        """Refuse requests with null blocks among the pages of tokens that they attend or write."""
        reqs = scheduled.size
        if not self._null_ends[:, :reqs].any():
            return
        for group, spec in enumerate(self.kv_cache_specs):
            if not self._null_ends[group, :reqs].any():
                continue
            size = self.tokens_per_block[group]
            ends = self._encoder_lens[:reqs] if group in self.cross_groups else lengths
            first = first_attended(spec, self._computed[:reqs])
            # Null blocks past the tokens do no harm, so each suspect's pages are looked at.
            for row in np.flatnonzero(
                (self._null_ends[group, :reqs] * size > first) & (scheduled > 0)
            ).tolist():
                start, end = int(first[row]) // size, -(-int(ends[row]) // size)
                nulls = np.flatnonzero(self._tables[group, row, start:end] == 0)
                if nulls.size:
                    token = max((start + int(nulls[0])) * size, int(first[row]))
                    limit = f"of request {self.req_ids[row]} in KV group {group} is null, and token {token} is attended"
                    raise BatchError("block", start + int(nulls[0]), limit, "give it a block of the pool")

    def _check_crossed(self, scheduled: Ints, computed: Ints) -> None:
        """Refuse requests whose computed tokens are in a block that another KV group of the pool writes too."""
        reqs, groups = scheduled.size, range(len(self.block_sizes))
        held = [
            {
                block
                for row in range(reqs)
                for block in self._tables[g, row, : self._num_blocks[g, row]].tolist()
            }
            for g in groups
        ]
        for group in self._self_groups:
            other = set().union(*(held[g] for g in groups if g != group)) - {0}
            size, spec = self.tokens_per_block[group], self.kv_cache_specs[group : group + 1]
            first = first_attended(spec[0], computed) if spec else np.zeros(reqs, dtype=np.int64)
            for row in np.flatnonzero((scheduled > 0) & (computed > first)).tolist():
                pages = self._tables[group, row, first[row] // size : -(-computed[row] // size)].tolist()
                if lost := other.intersection(pages):
                    limit = f"is given to another KV group too, so computed tokens of request {self.req_ids[row]} are lost"
                    remedy = "give each KV group blocks of its own, because the groups share one pool"
                    raise BatchError(f"block_ids[{group}]", min(lost), limit, remedy)

    def _check_rollback(self, fewer: Ints, computed: Ints) -> None:
        """Refuse to write tokens again that other requests read in a shared block."""
        for group in self._self_groups:
            size = self.tokens_per_block[group]
            first, last = fewer // size, computed // size
            for row in np.flatnonzero(first < last).tolist():
                blocks = self._tables[group, row, first[row] : last[row]]
                shared = blocks[self._holders.is_shared(group, blocks)]
                if shared.size:
                    name = self.req_ids[row]
                    limit = f"of request {name} goes back into block {shared[0]}, which another request reads"
                    remedy = "share blocks after the drafts in them are verified"
                    raise BatchError("num_tokens", int(computed[row] - fewer[row]), limit, remedy)

    def _refuse_short(self, field: str, needed: npt.NDArray[Any], groups: Iterable[int]) -> None:
        for group in groups:
            capacity = self._num_blocks[group, : needed.size] * self.tokens_per_block[group]
            if (needed > capacity).any():
                worst = int((needed > capacity).argmax())
                name = self.req_ids[worst]
                limit = (
                    f"of request {name} is past the {capacity[worst]} tokens of its pages in KV group {group}"
                )
                raise BatchError(field, int(needed[worst]), limit, "append_blocks first")
