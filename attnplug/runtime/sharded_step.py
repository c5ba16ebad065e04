"""A step under context parallelism, as ordinary batches over the keys of one rank and over the new tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.batch.context_parallel import local_lengths
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.runtime.staging import StepStaging

_Ints = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ShardedStep:
    """The keys of a step on this rank, for the KV groups whose tokens the ranks share.

    A step of at most one new token per request is a decode: its tokens are written first, and its queries attend all
    keys of the rank. In other steps the queries attend the computed keys of the rank, and the new tokens apart.
    Latent attention does so in long steps; in others each new token attends all keys of the rank that it sees.

    Args:
        place: of this rank.
        groups: the KV groups whose tokens the ranks share.
        is_decode: whether no request has more than one new token.
        has_context: whether any rank has a key that the queries attend in pages.
        local_lens: int32 `[R]`, the keys on this rank: computed ones, in a decode the new ones too.
        local_lens_host: the same on the host.
        row_lens: for latent attention in other steps, int32 `[T]`: the keys on this rank that each new token sees.
        row_lens_host: the same on the host.
        row_requests: the request of each new token, int64 `[T]`.
        row_requests_host: the same on the host.
        apart: whether latent attention attends the new tokens apart too.
        new_lens: of a graph: int32 `[R]`, its new tokens of each request.
        no_slots: of a graph: int64 `[T]`, all -1.
        row_starts: of a graph: int32 `[T + 1]`, 0, 1, 2, ...
        row_tables: of a graph: int32 `[G, T, max_blocks]`, the block table of each new token in each KV group.
        for_capture: whether a graph is captured with it.
    """

    place: ContextParallel
    groups: frozenset[int]
    is_decode: bool
    has_context: bool
    local_lens: torch.Tensor
    local_lens_host: _Ints
    row_lens: torch.Tensor | None = None
    row_lens_host: _Ints | None = None
    row_requests: torch.Tensor | None = None
    row_requests_host: _Ints | None = None
    apart: bool = False
    new_lens: torch.Tensor | None = None
    no_slots: torch.Tensor | None = None
    row_starts: torch.Tensor | None = None
    row_tables: torch.Tensor | None = None
    for_capture: bool = False

    @property
    def in_graph(self) -> bool:
        """Whether a CUDA graph runs it: its kernels read the same memory in each step."""
        return self.new_lens is not None

    @classmethod
    def uniform(
        cls,
        place: ContextParallel,
        groups: Collection[int],
        requests: int,
        computed: int,
        new: int,
        device: torch.device,
    ) -> ShardedStep:
        """A step of requests with equal numbers of computed and new tokens, such as one for a warm-up."""
        before = np.full(requests, computed + 1 if new == 1 else computed, dtype=np.int32)
        ends = np.tile(np.arange(computed + 1, computed + new + 1, dtype=np.int32), requests)
        local, rows = local_lengths(before, place), local_lengths(ends, place)
        return cls(
            place,
            frozenset(groups),
            is_decode=new == 1,
            has_context=bool(before.any()),
            local_lens=torch.from_numpy(local).to(device),
            local_lens_host=local,
            row_lens=torch.from_numpy(rows).to(device),
            row_lens_host=rows,
            row_requests=torch.arange(requests, device=device).repeat_interleave(new),
            row_requests_host=np.arange(requests).repeat(new),
        )

    @classmethod
    def staged(
        cls,
        place: ContextParallel,
        groups: frozenset[int],
        staging: StepStaging,
        scheduled: _Ints,
        computed: _Ints,
        requests: _Ints,
        positions: _Ints,
    ) -> ShardedStep:
        """A step of a builder, by way of its buffers.

        Args:
            place: of this rank.
            groups: the KV groups whose tokens the ranks share.
            staging: of the step.
            scheduled: new tokens of each request, `[R]`.
            computed: computed tokens of each request, `[R]`.
            requests: the request of each new token, `[T]`.
            positions: of each new token in its sequence, `[T]`.
        """
        reqs, is_decode = scheduled.size, int(scheduled.max(initial=0)) <= 1
        # A single new token sees all keys up to itself, so it is written first and counts as one of them.
        before = computed + scheduled if is_decode else computed
        staging.local_lens.np[:reqs] = local_lengths(before, place)
        rows = positions.size if staging.row_lens.np.size and not is_decode else 0
        if rows:
            staging.row_requests.np[:rows] = requests
            staging.row_lens.np[:rows] = local_lengths(positions + 1, place)
        return cls(
            place,
            groups,
            is_decode,
            has_context=bool(before.any()),
            local_lens=staging.local_lens.copy_to_gpu(reqs),
            local_lens_host=staging.local_lens.np[:reqs],
            row_lens=staging.row_lens.copy_to_gpu(rows) if rows else None,
            row_lens_host=staging.row_lens.np[:rows] if rows else None,
            row_requests=staging.row_requests.copy_to_gpu(rows) if rows else None,
            row_requests_host=staging.row_requests.np[:rows] if rows else None,
        )

    def context(
        self, common: CommonAttentionMetadata, table: torch.Tensor, slots: torch.Tensor
    ) -> CommonAttentionMetadata:
        """The step's queries over the keys of this rank, none of which comes after them."""
        lengths = self.local_lens, self.local_lens_host
        return self._batch(common, *lengths, block_table_tensor=table, slot_mapping=slots, causal=False)

    def rows(
        self, common: CommonAttentionMetadata, table: torch.Tensor, slots: torch.Tensor, group: int
    ) -> CommonAttentionMetadata:
        """Each new token as a request of its own, with the keys of this rank that it sees: for latent attention.

        If new tokens are attended apart, it sees the computed ones.
        """
        lens, host, requests, tables = (
            self.row_lens,
            self.row_lens_host,
            self.row_requests,
            self.row_tables,
        )
        if self.is_decode or lens is None or host is None:
            lengths = self.local_lens, self.local_lens_host
            return self._batch(common, *lengths, block_table_tensor=table, slot_mapping=slots)
        count = lens.shape[0]
        if self.apart and requests is not None and self.row_requests_host is not None:
            lens = self.local_lens.index_select(0, requests)
            host = self.local_lens_host[self.row_requests_host]
        # Made on the device, because a copy from pageable memory would wait for it.
        starts = self.row_starts
        if starts is None:
            starts = torch.arange(count + 1, dtype=torch.int32, device=lens.device)
        if tables is not None:
            table = tables[group]
        elif requests is not None:
            table = table.index_select(0, requests)
        return self._batch(
            common,
            lens,
            host,
            query_start_loc=starts,
            query_start_loc_cpu=torch.arange(count + 1, dtype=torch.int32, device="cpu"),
            num_reqs=count,
            max_query_len=min(count, 1),
            block_table_tensor=table,
            slot_mapping=slots,
            logits_indices_padded=None,
            num_logits_indices=None,
            logits_indices_cpu=None,
        )

    def new_tokens(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The new tokens of the step alone, with K and V in the call."""
        queries, slots = common.query_start_loc_cpu.diff(), self.no_slots
        return dataclasses.replace(
            common,
            seq_lens=common.query_start_loc.diff() if self.new_lens is None else self.new_lens,
            seq_lens_host=queries.numpy(),
            seq_lens_host_exact=True,
            max_seq_len=common.max_query_len,
            key_start_loc=common.query_start_loc,
            key_start_loc_cpu=common.query_start_loc_cpu,
            slot_mapping=torch.full_like(common.slot_mapping, PAD_SLOT_ID) if slots is None else slots,
            logits_indices_padded=None,
            num_logits_indices=None,
            logits_indices_cpu=None,
            _seq_lens_cpu=None,
            _num_computed_tokens_cpu=None,
        )

    def _batch(
        self, common: CommonAttentionMetadata, lengths: torch.Tensor, host: _Ints, **changes: Any
    ) -> CommonAttentionMetadata:
        return dataclasses.replace(
            common,
            seq_lens=lengths,
            seq_lens_host=host,
            # An upper bound that is equal on all ranks, so that kernels split the keys alike.
            max_seq_len=self.place.most_local(common.max_seq_len),
            _seq_lens_cpu=None,
            _num_computed_tokens_cpu=None,
            **changes,
        )
