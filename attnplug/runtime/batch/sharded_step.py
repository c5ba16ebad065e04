"""A step under context parallelism, as ordinary batches over the keys of one rank and over the new tokens.

The zig-zag split of a prefill: each rank attends two pieces of each request's new tokens, over the keys before them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.batch.context_parallel import local_lengths
from attnplug.core.batch.host import optional_rows, to_device
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.metadata import PAD_SLOT_ID, WITHOUT_LOGITS, CommonAttentionMetadata
from attnplug.runtime.batch.staging import StepStaging

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
        """The step's queries over the keys of this rank, which all come before them."""
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
            **WITHOUT_LOGITS,
            **(
                {}
                if self.row_requests_host is None
                else optional_rows(common, self.row_requests_host, slice(None))
            ),
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
            **WITHOUT_LOGITS,
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
            # An upper bound that is equal on all ranks, so that kernels split the keys in the same way.
            max_seq_len=self.place.most_local(common.max_seq_len),
            _seq_lens_cpu=None,
            _num_computed_tokens_cpu=None,
            **changes,
        )


_Positions = npt.NDArray[np.int64]

# Pairs of a new query and a new key from which a split spares more than its copies take. It is one request of 1,024 new
# tokens. With 32 heads of 128 elements its products take about 15 us on an H200, and the copies of keys, queries and
# outputs about 10. It is estimated and not measured yet.
_LEAST_PAIRS = 1 << 20
_LEAST_CPU_PAIRS = 1 << 9


def pays_to_split(query_lens: npt.NDArray[Any], device: torch.device) -> bool:
    """Whether a step with these numbers of new tokens is long enough; it is the same on all ranks."""
    # Squares of int32 lengths would wrap.
    lens = query_lens.astype(np.int64)
    least = _LEAST_CPU_PAIRS if device.type == "cpu" else _LEAST_PAIRS
    return int((lens * lens).sum()) >= least


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SplitQueries:
    """The new tokens of a step whose rows this rank attends, over the new tokens before them.

    With N ranks the new tokens of each request are cut into 2 N pieces of nearly equal length. A rank has the pieces
    r and 2 N - 1 - r: early pieces see few keys and late ones many, so all ranks have equal work.

    Args:
        rows: int64 `[t]`, the rows of this rank.
        key_rows: int64 `[k]`, for each piece the rows of its request from the first new token to the piece's last.
        pieces: the pieces as requests with K and V in the call, packed as `rows` and `key_rows` are.
        most_rows: the most rows that a rank has.
        gathered: int64 `[T]`, the place of each row of the step among the ranks' rows, `most_rows` for each rank.
    """

    rows: torch.Tensor
    key_rows: torch.Tensor
    pieces: CommonAttentionMetadata
    most_rows: int
    gathered: torch.Tensor

    @classmethod
    def of(cls, common: CommonAttentionMetadata, place: ContextParallel) -> SplitQueries:
        """The split of a step; the host reads no value from the device."""
        device = common.query_start_loc.device
        starts = common.query_start_loc_cpu.numpy().astype(np.int64)
        by_rank = [_pieces(starts, place.size, rank) for rank in range(place.size)]
        rows = [_ranges(first + begin, end - begin) for first, begin, end in by_rank]
        # Equal on all ranks, because a collective sends as many rows from each.
        most = max((each.size for each in rows), default=0)
        gathered = np.zeros(common.num_actual_tokens, dtype=np.int64)
        for rank, own in enumerate(rows):
            gathered[own] = rank * most + np.arange(own.size)
        first, begin, end = by_rank[place.rank]
        return cls(
            rows=to_device(rows[place.rank], device),
            key_rows=to_device(_ranges(first, end), device),
            pieces=_batch(common, begin, end, device),
            most_rows=most,
            gathered=to_device(gathered, device),
        )


def most_rows(tokens: int, requests: int, size: int) -> int:
    """The most rows of a rank in any step of up to `tokens` new tokens and `requests` requests."""
    return min(tokens, tokens // size + 2 * requests)


def _pieces(starts: _Positions, size: int, rank: int) -> tuple[_Positions, _Positions, _Positions]:
    """The first row of the request of each piece of a rank, and the piece's begin and end in the request."""
    lens = np.diff(starts)
    # Rounded down at every cut, so that lengths differ by at most one token.
    cuts = lens[:, None] * np.arange(2 * size + 1) // (2 * size)
    own = np.array([rank, 2 * size - 1 - rank])
    begin, end = cuts[:, own].ravel(), cuts[:, own + 1].ravel()
    kept = end > begin
    return starts[:-1].repeat(2)[kept], begin[kept], end[kept]


def _ranges(first: _Positions, counts: _Positions) -> _Positions:
    """`first[i], first[i] + 1, ...`, `counts[i]` of each, one after another."""
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def _batch(
    common: CommonAttentionMetadata, begin: _Positions, end: _Positions, device: torch.device
) -> CommonAttentionMetadata:
    lens, host = end - begin, end.astype(np.int32)
    queries, keys = (torch.from_numpy(_starts(each)) for each in (lens, end))
    tokens, reqs = int(lens.sum()), end.size
    return CommonAttentionMetadata(
        query_start_loc=to_device(queries.numpy(), device),
        query_start_loc_cpu=queries,
        seq_lens=to_device(host, device),
        num_reqs=reqs,
        num_actual_tokens=tokens,
        max_query_len=int(lens.max(initial=0)),
        max_seq_len=int(end.max(initial=0)),
        # No kernel reads it: K and V come with the call.
        block_table_tensor=common.block_table_tensor.new_zeros(reqs, 1),
        slot_mapping=torch.full((tokens,), PAD_SLOT_ID, dtype=torch.int64, device=device),
        key_start_loc=to_device(keys.numpy(), device),
        key_start_loc_cpu=keys,
        seq_lens_host=host,
    )


def _starts(lengths: _Positions) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
