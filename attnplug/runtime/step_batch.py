"""Makes the batch of each step from the requests in flight, in persistent buffers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.batch.context_parallel import local_lengths, local_offsets
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import KVCacheSpec
from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.runtime.arguments import integer
from attnplug.runtime.cascade import shared_prefix_lens
from attnplug.runtime.null_blocks import first_attended
from attnplug.runtime.placeholders import PlaceholderMap, Span, map_placeholders, spans_of
from attnplug.runtime.request_counts import Counts, Ints, check_at_most, counts_of
from attnplug.runtime.requests import RequestTable
from attnplug.runtime.sharded_step import ShardedStep
from attnplug.runtime.staging import StepStaging


@dataclasses.dataclass(slots=True, eq=False)
class StepBatch:
    """One step's batch over all KV groups.

    Its tensors belong to the builder and are valid until the next step. On the CPU the block tables are the
    builder's own tables, which change with the requests.

    Args:
        common: the batch for KV group `common_group`, the first with decoder tokens.
        block_tables: int32 `[G, R, max_blocks]`, the tables of the G KV groups.
        slot_mappings: int64 `[G, S]`; the first `num_slots` of each group are valid.
        num_slots: tokens written in each group. Cross groups write the encoder tokens of requests that run their
            first tokens, in order of requests; other groups write the batch's tokens.
        cross_groups: the KV groups with encoder tokens.
        req_ids: the requests in the order of the batch.
        block_sizes: tokens per page of each KV group.
        placeholders: by modality, the tokens of this step that get embeddings.
        order: int64 `[R]`, the index that each request had before the step ordered them; None if it moved none.
        shared_prefix_lens: computed tokens of the leading blocks that all requests share, in each KV group; empty if
            unknown, which counts as 0.
        kv_cache_specs: of each KV group, as given to the builder; empty if unknown.
        sharded: the keys on this rank, under context parallelism; None without.
    """

    common: CommonAttentionMetadata
    common_group: int
    block_tables: torch.Tensor
    slot_mappings: torch.Tensor
    num_slots: tuple[int, ...]
    cross_groups: frozenset[int]
    req_ids: tuple[str, ...]
    block_sizes: tuple[int, ...]
    placeholders: Mapping[str, PlaceholderMap] = dataclasses.field(default_factory=dict)
    order: Ints | None = None
    shared_prefix_lens: tuple[int, ...] = ()
    kv_cache_specs: tuple[KVCacheSpec, ...] = ()
    sharded: ShardedStep | None = None

    def in_former_order(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rows of `tokens [T, ...]`, such as an output, by the order that the requests had before the step."""
        if self.order is None:
            return tokens[: self.common.num_actual_tokens]
        starts: list[int] = self.common.query_start_loc_cpu.tolist()
        spans = [
            torch.arange(starts[row], starts[row + 1], device="cpu")
            for row in np.argsort(self.order).tolist()
        ]
        return tokens[torch.cat(spans).to(tokens.device)]

    def of_group(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block table `[R, max_blocks]` and valid slots of one KV group."""
        return self.block_tables[group], self.slot_mappings[group, : self.num_slots[group]]


class StepBatchBuilder(RequestTable):
    """Stores the requests in flight, and makes each step's batch without a Python loop over them.

    A call that raises changes nothing.

    Args:
        max_num_seqs: most requests at once.
        max_num_batched_tokens: most tokens in a step.
        max_model_len: longest sequence.
        block_sizes: tokens per page of each KV group.
        device: of the batch.
        cross_groups: the KV groups with encoder tokens.
        max_encoder_len: longest encoder sequence, for cross groups.
        reorder_batch_thresholds: of the builders that read the batches. Each step orders its requests by them:
            decodes first, then short extends, then the rest. Without any, requests keep their order.
        mm_prefix: whether layers have mm_prefix. The placeholders of requests are then spans, which a step
            computes as a whole, and its batch has `mm_prefix_spans`.
        mm_prefix_modalities: the modalities whose placeholders are such spans, such as ["image"]; None for all.
        sparse_topk: the most positions that a query of a sparse layer chooses; 0 without sparse layers. A step's
            batch has a `selection` of this width, always in the same memory and not given yet, for the model's
            indexer to fill.
        cascade_groups: the KV groups whose steps need `shared_prefix_lens`; None for all with decoder tokens.
        num_blocks: blocks of the pool. Block numbers past it are refused; with None, only those past int32.
        kv_cache_specs: of each KV group. Null blocks are then refused where a request still attends their tokens;
            without any, each group may have them anywhere.
        context_parallel: the rank of this process among those that share the tokens of groups without a window or
            chunks; it needs `kv_cache_specs`. A block number of such a group covers a page on each rank, and tokens
            of other ranks have slot -1.

    Raises:
        BatchError: a size is below 1, no KV group is given, a cross group is not one of them, or modalities are
            given without mm_prefix.
    """

    _stepped: tuple[str, ...] | None = None

    def step(self, num_scheduled_tokens: Counts = 1, num_logits: Counts | None = None) -> StepBatch:
        """The batch that runs the scheduled tokens of every request.

        Each request in flight is in the batch. One without scheduled tokens has a query of length 0 and no rows.

        Args:
            num_scheduled_tokens: new tokens by request, or a sequence in the order of `req_ids`, or one number
                for all. A request that a mapping leaves out runs 0 tokens. The step may then change the order:
                see `StepBatch.req_ids` and `order`.
            num_logits: the tokens at each request's end whose logits are wanted, in the same form: 0 for a prompt
                that later steps complete, 1 to draw a token, more to verify drafts. Their rows are the batch's
                `logits_indices_padded`. None leaves it out; layers of fast prefill then compute all tokens.

        Raises:
            BatchError: a mapping names a request that is not in flight; a sequence has counts of another number of
                requests; counts are negative; there are too many tokens; more logits than tokens are wanted; a
                sequence is longer than max_model_len; a request has no pages for its tokens, or null blocks among
                them; a multimodal span is split.
        """
        reqs = self.num_reqs
        scheduled = counts_of("num_scheduled_tokens", num_scheduled_tokens, self.req_ids)
        computed = self._computed[:reqs]
        max_query = int(scheduled.max(initial=0))
        self._check_counts(scheduled, max_query)
        lengths = computed + scheduled
        longest = int(lengths.max(initial=0))
        self._check_lengths(lengths, longest)
        wanted = None if num_logits is None else counts_of("num_logits", num_logits, self.req_ids)
        if wanted is not None:
            check_at_most("num_logits", wanted, scheduled, self.req_ids, "scheduled tokens")
        if self.cross_groups:
            self._check_encoder_pages(scheduled)
        self._check_null_blocks(scheduled, lengths)
        if self._mm_prefix is not None and self._placeholders:
            for row in self._rows_with_placeholders(scheduled, computed):
                name, tokens_of = self.req_ids[row], (int(computed[row]), int(scheduled[row]))
                self._mm_prefix.check_step(name, self._placeholders[name], *tokens_of)
        # All checks come before this line, because a step that is refused moves nothing.
        order = self._put_in_order(scheduled)
        if order is not None:
            scheduled, lengths = scheduled[order], lengths[order]
            wanted = None if wanted is None else wanted[order]
        unwritten = self._unwritten(scheduled) if self.cross_groups else None

        staging: StepStaging = self._ring.acquire()
        starts = staging.query_start_loc.np
        np.cumsum(scheduled, out=starts[1 : reqs + 1])
        tokens = int(starts[reqs])
        staging.seq_lens.np[:reqs] = lengths
        encoder_tokens = 0 if unwritten is None else int(unwritten.sum())
        counts = self._slot_counts(tokens, encoder_tokens)
        slots = staging.slots.np(len(counts), max(counts))
        self._fill_slots(slots, starts[:reqs], scheduled, computed, tokens, max_query)
        if unwritten is not None:
            self._fill_encoder_slots(slots, unwritten, encoder_tokens)
            staging.encoder_seq_lens.np[:reqs] = self._encoder_lens[:reqs]
        width = int(self._num_blocks[:, :reqs].max(initial=1))
        spans = self._spans(starts, scheduled, computed) if self._placeholders else []
        maps = map_placeholders(spans, staging.placeholders) if spans else {}
        if self._mm_prefix is not None:
            self._mm_prefix.fill(spans, staging.mm_prefix_spans.np[:tokens])
        if wanted is not None:
            rows = self._rows[: int(wanted.sum())] + np.repeat(starts[1 : reqs + 1] - wanted.cumsum(), wanted)
            staging.logits_indices.np[: rows.size] = rows
        names = tuple(self.req_ids)
        shared = shared_prefix_lens(self._tables[:, :reqs], self.block_sizes, computed, self._cascade_groups)
        self._scheduled[:reqs] = scheduled
        self._stepped = names
        logits = None if wanted is None else int(wanted.sum())
        sharded = self._sharded_step(staging, starts[:reqs], scheduled, computed, max_query)
        return self._batch(
            staging, names, counts, max_query, longest, width, maps, order, shared, logits, sharded
        )

    def finish_step(self, accepted: Counts | None = None) -> None:
        """Count the last step's tokens as computed: all, or only the accepted speculative ones.

        If requests were added, removed or swapped since the step, `accepted` must be a mapping by request. A mapping
        may leave out the requests that ran 0 tokens.

        Raises:
            BatchError: no step was begun, counts of another number of requests, or more tokens are
                accepted than scheduled.
        """
        if self._stepped is None:
            raise BatchError("step", None, "is required before finish_step, once for each")
        reqs = self.num_reqs
        scheduled = counts = self._scheduled[:reqs]
        if accepted is not None:
            # A plain sequence is in the order of the step, which these requests no longer have.
            if not isinstance(accepted, (Mapping, int)) and self._stepped != tuple(self.req_ids):
                limit = "has no order: requests changed since the step"
                remedy = "give the counts by request, as a mapping"
                raise BatchError("accepted", accepted, limit, remedy)
            counts = counts_of("accepted", accepted, self.req_ids, scheduled)
            check_at_most("accepted", counts, scheduled, self.req_ids, "scheduled tokens")
        # Set here and not in `step`: a step that was not finished writes the encoder again.
        self._encoder_written[:reqs] |= scheduled > 0
        self._computed[:reqs] += counts
        self._stepped = None

    def rollback(self, num_tokens: Counts) -> None:
        """Count the last computed tokens of requests as not computed, so that later steps write them again.

        It is for tokens of several finished steps, such as the draft steps of a draft model whose drafts were
        rejected; `finish_step(accepted)` does it for one step. Requests keep their pages.

        Args:
            num_tokens: by request, in the order of `req_ids`, or one number for all. A mapping may leave out the
                requests without computed tokens.

        Raises:
            BatchError: a step is not finished; counts of another number of requests; more tokens than are computed; a
                return to before the last `free_blocks`, because the keys of its window are gone.
        """
        if self._stepped is not None:
            raise BatchError("step", "not finished", "cannot be rolled back", "call finish_step first")
        computed, served = self._computed[: self.num_reqs], self._first_served[: self.num_reqs]
        counts = counts_of("num_tokens", num_tokens, self.req_ids, computed)
        check_at_most("num_tokens", counts, computed, self.req_ids, "computed tokens")
        bad = (counts > 0) & (computed - counts < served)
        if bad.any():
            worst = int(bad.argmax())
            limit = f"of request {self.req_ids[worst]} goes to before token {served[worst]}, where pages were freed"
            raise BatchError(
                "num_tokens", int(counts[worst]), limit, "free pages after the drafts are verified"
            )
        computed -= counts

    def profile_step(self, num_reqs: int, num_tokens: int) -> StepBatch:
        """A batch of dummy requests for memory profiling, with slots -1 and the null block for all pages.

        With cross groups, each request has the longest encoder sequence.

        Raises:
            BatchError: requests are in flight, or the batch is above the builder's limits.
        """
        if self.num_reqs:
            raise BatchError("num_reqs", self.num_reqs, "requests are in flight", "profile before adding any")
        num_reqs, num_tokens = integer("num_reqs", num_reqs), integer("num_tokens", num_tokens)
        limit = min(self.max_num_seqs, num_tokens)
        if not 1 <= num_reqs <= limit:
            raise BatchError("num_reqs", num_reqs, f"must be in 1 .. {limit}")
        limit = min(self.max_num_batched_tokens, num_reqs * self.max_model_len)
        if num_tokens > limit:
            raise BatchError("num_tokens", num_tokens, f"must not pass {limit} with {num_reqs} requests")
        lengths = np.full(num_reqs, num_tokens // num_reqs, dtype=np.int64)
        lengths[: num_tokens % num_reqs] += 1
        staging: StepStaging = self._ring.acquire()
        np.cumsum(lengths, out=staging.query_start_loc.np[1 : num_reqs + 1])
        staging.seq_lens.np[:num_reqs] = lengths
        staging.encoder_seq_lens.np[:num_reqs] = self.max_encoder_len
        encoder_tokens = num_reqs * self.max_encoder_len
        counts = self._slot_counts(num_tokens, encoder_tokens)
        staging.slots.np(len(counts), max(counts))[:] = PAD_SLOT_ID
        if self._mm_prefix is not None:
            self._mm_prefix.fill([], staging.mm_prefix_spans.np[:num_tokens])
        # Old requests leave their pages in the rows; a profile run must read the null block only.
        self._tables[:, :num_reqs] = 0
        names = tuple(f"profile-{index}" for index in range(num_reqs))
        longest = int(lengths[0])
        # From the start, so `_computed` of earlier requests does not count.
        computed = np.zeros(num_reqs, dtype=np.int64)
        starts = staging.query_start_loc.np[:num_reqs]
        sharded = self._sharded_step(staging, starts, lengths, computed, longest)
        return self._batch(
            staging, names, counts, longest, longest, self._tables.shape[2], {}, sharded=sharded
        )

    def _slot_counts(self, tokens: int, encoder_tokens: int) -> tuple[int, ...]:
        groups = range(len(self.block_sizes))
        return tuple(encoder_tokens if g in self.cross_groups else tokens for g in groups)

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

    def _unwritten(self, scheduled: Ints) -> Ints:
        """Encoder tokens of each request that this step writes."""
        lengths = self._encoder_lens[: scheduled.size]
        kept = self._encoder_written[: scheduled.size] | (scheduled == 0)
        return np.where(kept, 0, lengths).astype(np.int64)

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

    def _fill_slots(
        self, slots: Ints, starts: Ints, scheduled: Ints, computed: Ints, tokens: int, max_query: int
    ) -> None:
        reqs = scheduled.size
        # Both tests: with two tokens for one request and none for another, the sum is equal too.
        if tokens == reqs and max_query == 1:
            rows, positions = self._rows[:reqs], computed
        else:
            rows = np.repeat(self._rows[:reqs], scheduled)
            positions = self._rows[:tokens] + np.repeat(computed - starts, scheduled)
        if not self._is_uniform:
            for group in self._self_groups:
                self._put_slots(slots[group, :tokens], group, rows, positions)
            return
        size = self.block_sizes[0]
        page, offset = np.divmod(positions, size)
        page += rows * self._tables.shape[2]
        # Block numbers are int32, but their slots may exceed it.
        np.multiply(self._flat_tables.take(page, axis=1), size, out=slots, dtype=np.int64)
        slots += offset
        if self._has_null_pages:
            # These slots lie in block 0, the null block, which no request may write.
            slots[slots < size] = PAD_SLOT_ID

    def _put_slots(self, out: Ints, group: int, rows: Ints, positions: Ints) -> None:
        size = self.block_sizes[group]
        page, offset = np.divmod(positions, self.tokens_per_block[group])
        np.multiply(self._tables[group, rows, page], size, out=out, dtype=np.int64)
        if group in self.sharded_groups and self.context_parallel is not None:
            offset = local_offsets(positions, page, size, self.context_parallel)
            out[offset < 0] = PAD_SLOT_ID
            offset = np.maximum(offset, 0)
        out += offset
        if self._has_null_pages:
            # These slots lie in block 0, the null block, which no request may write.
            out[out < size] = PAD_SLOT_ID

    def _sharded_step(
        self, staging: StepStaging, starts: npt.NDArray[Any], scheduled: Ints, computed: Ints, max_query: int
    ) -> ShardedStep | None:
        """The keys on this rank; None without context parallelism."""
        place = self.context_parallel
        if place is None or not self.sharded_groups:
            return None
        reqs, is_decode = scheduled.size, max_query <= 1
        # A single new token sees all keys up to itself, so it is written first and counts as one of them.
        before = computed + scheduled if is_decode else computed
        staging.local_lens.np[:reqs] = local_lengths(before, place)
        rows = 0
        if staging.row_lens.np.size and not is_decode:
            rows = int(scheduled.sum())
            requests = np.repeat(self._rows[:reqs], scheduled)
            staging.row_requests.np[:rows] = requests
            ends = self._rows[:rows] + np.repeat(computed - starts, scheduled) + 1
            staging.row_lens.np[:rows] = local_lengths(ends, place)
        return ShardedStep(
            place,
            self.sharded_groups,
            is_decode,
            has_context=bool(before.any()),
            local_lens=staging.local_lens.copy_to_gpu(reqs),
            local_lens_host=staging.local_lens.np[:reqs],
            row_lens=staging.row_lens.copy_to_gpu(rows) if rows else None,
            row_lens_host=staging.row_lens.np[:rows] if rows else None,
            row_requests=staging.row_requests.copy_to_gpu(rows) if rows else None,
        )

    def _fill_encoder_slots(self, slots: Ints, unwritten: Ints, count: int) -> None:
        rows = np.repeat(self._rows[: unwritten.size], unwritten)
        positions = self._rows[:count] - np.repeat(np.cumsum(unwritten) - unwritten, unwritten)
        for group in self.cross_groups:
            self._put_slots(slots[group, :count], group, rows, positions)

    def _rows_with_placeholders(self, scheduled: Ints, computed: Ints) -> list[int]:
        """The requests that may have placeholders among their scheduled tokens."""
        ahead = (self._placeholder_end[: scheduled.size] > computed) & (scheduled > 0)
        rows: list[int] = np.flatnonzero(ahead).tolist()
        return rows

    def _spans(self, starts: npt.NDArray[Any], scheduled: Ints, computed: Ints) -> list[Span]:
        """The placeholders among the scheduled tokens, in order of tokens."""
        spans: list[Span] = []
        for row in self._rows_with_placeholders(scheduled, computed):
            name = self.req_ids[row]
            tokens = int(computed[row]), int(scheduled[row]), int(starts[row])
            spans += spans_of(name, self._placeholders[name], *tokens)
        return spans

    def _batch(
        self,
        staging: StepStaging,
        names: tuple[str, ...],
        counts: tuple[int, ...],
        max_query: int,
        longest: int,
        width: int,
        placeholders: Mapping[str, PlaceholderMap],
        order: Ints | None = None,
        shared: tuple[int, ...] = (),
        logits: int | None = None,
        sharded: ShardedStep | None = None,
    ) -> StepBatch:
        reqs, first = len(names), self._self_groups[0] if self._self_groups else 0
        tokens = int(staging.query_start_loc.np[reqs])
        tables = staging.send_tables(self._tables, self._tables_cpu, reqs, width)
        slots = staging.slots.copy_to_gpu(len(counts), max(counts))
        optional: dict[str, Any] = {}
        if self.cross_groups:
            optional["encoder_seq_lens"] = staging.encoder_seq_lens.copy_to_gpu(reqs)
            optional["encoder_seq_lens_cpu"] = staging.encoder_seq_lens.np[:reqs]
        if logits is not None:
            optional["num_logits_indices"] = logits
            optional["logits_indices_padded"] = staging.logits_indices.copy_to_gpu(logits)
            optional["logits_indices_cpu"] = staging.logits_indices.cpu[:logits]
        if self._mm_prefix is not None:
            optional["mm_prefix_spans"] = staging.mm_prefix_spans.copy_to_gpu(tokens)
            optional["mm_prefix_spans_cpu"] = staging.mm_prefix_spans.cpu[:tokens]
        if self._selection is not None:
            optional["selection"] = self._selection[:tokens]
            # A selection of the step before would be taken for this one's if nobody wrote it.
            optional["selection"].clear()
        common = CommonAttentionMetadata(
            query_start_loc=staging.query_start_loc.copy_to_gpu(reqs + 1),
            query_start_loc_cpu=staging.query_start_loc.cpu[: reqs + 1],
            seq_lens=staging.seq_lens.copy_to_gpu(reqs),
            num_reqs=reqs,
            num_actual_tokens=tokens,
            max_query_len=max_query,
            max_seq_len=longest,
            block_table_tensor=tables[first],
            slot_mapping=slots[first, : counts[first]],
            seq_lens_host=staging.seq_lens.np[:reqs],
            **optional,
        )
        # All copies of the set are issued, so the event that guards it can be recorded.
        self._ring.release()
        own = self.cross_groups, names, self.block_sizes, placeholders, order, shared, self.kv_cache_specs
        return StepBatch(common, first, tables, slots, counts, *own, sharded)
