"""Makes the batch of each step from the requests in flight, in persistent buffers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from attnplug.core.arguments import integer
from attnplug.core.errors import BatchError
from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.runtime.batch.cascade import shared_prefix_lens
from attnplug.runtime.batch.engine_values import Counts, Ints, check_at_most, counts_of
from attnplug.runtime.batch.placeholders import PlaceholderMap, Span, map_placeholders, spans_of
from attnplug.runtime.batch.request_checks import CheckedRequests
from attnplug.runtime.batch.request_rows import Members
from attnplug.runtime.batch.sharded_step import ShardedStep
from attnplug.runtime.batch.staging import StepStaging
from attnplug.runtime.batch.step_batch import StepBatch


class StepBatchBuilder(CheckedRequests):
    """Stores the requests in flight, and makes each step's batch without a Python loop over them.

    A call that raises changes nothing, also if an interrupt raises at any line. An interrupted `step` may have ordered
    the requests and count as made; it can be made again.

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
        num_blocks: blocks of the pool. Block numbers past it are refused, and blocks of another request that would be
            written. With None, only those past int32 are refused, and those that a request has twice.
        kv_cache_specs: of each KV group. Null blocks are then refused where a request still attends their tokens;
            without any, each group may have them anywhere.
        context_parallel: the rank of this process among those that share the tokens of groups without a window or
            chunks; it needs `kv_cache_specs`. A block number of such a group covers a page on each rank, and tokens
            of other ranks have slot -1.
        one_pool: whether a block number is the same memory in all KV groups. A step is then refused if a block of two
            groups has computed tokens.

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
        if self._holders.may_cross:
            self._check_crossed(scheduled, computed)
        if self._mm_prefix is not None and self._placeholders:
            for row in self._rows_with_placeholders(self._rows[:reqs], scheduled, computed):
                name, tokens_of = self.req_ids[row], (int(computed[row]), int(scheduled[row]))
                self._mm_prefix.check_step(name, self._placeholders[name], *tokens_of)
        # All checks come before this line, because a step that is refused moves nothing.
        ordered, order = self._ordered(scheduled), None
        names, at = self.req_ids, self._rows[:reqs]
        if ordered is not None:
            order = at = ordered[0]
            names = [names[row] for row in order.tolist()]
            scheduled, lengths, computed = scheduled[order], lengths[order], computed[order]
            wanted = None if wanted is None else wanted[order]
        unwritten = self._unwritten(scheduled, at) if self.cross_groups else None

        staging: StepStaging = self._ring.acquire()
        starts = staging.fields.query_start_loc
        np.cumsum(scheduled, out=starts[1 : reqs + 1])
        tokens = int(starts[reqs])
        staging.fields.seq_lens[:reqs] = lengths
        filled: dict[str, int] = {}
        encoder_tokens = 0 if unwritten is None else int(unwritten.sum())
        counts = self._slot_counts(tokens, encoder_tokens)
        slots = staging.fields.slots(len(counts), max(counts))
        # Both tests: with two tokens for one request and none for another, the sum is equal too.
        if tokens == reqs and max_query == 1:
            rows, positions = at, computed
        else:
            rows = np.repeat(at, scheduled)
            positions = self._rows[:tokens] + np.repeat(computed - starts[:reqs], scheduled)
        self._slots.fill(slots, rows, positions, self._has_null_pages)
        if unwritten is not None:
            encoder_rows = np.repeat(at, unwritten)
            begins = np.repeat(np.cumsum(unwritten) - unwritten, unwritten)
            encoder_positions = self._rows[:encoder_tokens] - begins
            self._slots.fill_encoder(slots, encoder_rows, encoder_positions, self._has_null_pages)
            staging.inputs["encoder_seq_lens"].np[:reqs] = self._encoder_lens[at]
            filled["encoder_seq_lens"] = reqs
        width = int(self._num_blocks[:, :reqs].max(initial=1))
        spans = self._spans(names, at, starts, scheduled, computed) if self._placeholders else []
        maps = map_placeholders(spans, staging.placeholders) if spans else {}
        if self._mm_prefix is not None:
            self._mm_prefix.fill(spans, staging.inputs["mm_prefix_spans"].np[:tokens])
            filled["mm_prefix_spans"] = tokens
        if wanted is not None:
            ends = np.repeat(starts[1 : reqs + 1] - wanted.cumsum(), wanted)
            rows_wanted = staging.inputs["logits_indices_padded"].np[: ends.size]
            np.add(self._rows[: ends.size], ends, out=rows_wanted, casting="same_kind")
            filled["logits_indices_padded"] = ends.size
        shared = shared_prefix_lens(self._tables[:, :reqs], self.block_sizes, computed, self._cascade_groups)
        if ordered is not None and self.sharded_groups:
            rows = np.repeat(self._rows[:reqs], scheduled)
        sharded = self._sharded_step(staging, scheduled, computed, rows, positions)
        self._commit_step(names, ordered, scheduled)
        return self._batch(
            staging, tuple(names), counts, max_query, longest, width, filled, maps, order, shared, sharded
        )

    def finish_step(self, accepted: Counts | None = None) -> None:
        """Count the last step's tokens as computed: all, or only the accepted speculative ones.

        If requests were added, removed or swapped since the step, `accepted` must be a mapping by request. A mapping
        may leave out the requests that ran 0 tokens.

        Raises:
            BatchError: no step was begun, counts of another number of requests, or more tokens are
                accepted than scheduled.
        """
        reqs = self.num_reqs
        if self._stepped is None:
            raise BatchError("step", None, "is required before finish_step, once for each")
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
        written = self._encoder_written[:reqs] | (scheduled > 0)
        self._change = functools.partial(self._finish, self._computed[:reqs] + counts, written)

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
        reqs = self.num_reqs
        if self._stepped is not None:
            raise BatchError("step", "not finished", "cannot be rolled back", "call finish_step first")
        computed, served = self._computed[:reqs], self._first_served[:reqs]
        counts = counts_of("num_tokens", num_tokens, self.req_ids, computed)
        check_at_most("num_tokens", counts, computed, self.req_ids, "computed tokens")
        bad = (counts > 0) & (computed - counts < served)
        if bad.any():
            worst = int(bad.argmax())
            limit = f"of request {self.req_ids[worst]} goes to before token {served[worst]}, where pages were freed"
            raise BatchError(
                "num_tokens", int(counts[worst]), limit, "free pages after the drafts are verified"
            )
        self._check_rollback(computed - counts, computed)
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
        np.cumsum(lengths, out=staging.fields.query_start_loc[1 : num_reqs + 1])
        staging.fields.seq_lens[:num_reqs] = lengths
        filled: dict[str, int] = {}
        if self.cross_groups:
            staging.inputs["encoder_seq_lens"].np[:num_reqs] = self.max_encoder_len
            filled["encoder_seq_lens"] = num_reqs
        encoder_tokens = num_reqs * self.max_encoder_len
        counts = self._slot_counts(num_tokens, encoder_tokens)
        staging.fields.slots(len(counts), max(counts))[:] = PAD_SLOT_ID
        if self._mm_prefix is not None:
            self._mm_prefix.fill([], staging.inputs["mm_prefix_spans"].np[:num_tokens])
            filled["mm_prefix_spans"] = num_tokens
        # Old requests leave their pages in the rows; a profile run must read the null block only.
        self._tables[:, :num_reqs] = 0
        self._changed(slice(None), slice(num_reqs), 0, self._tables.shape[2])
        names = tuple(f"profile-{index}" for index in range(num_reqs))
        longest = int(lengths[0])
        # From the start, so `_computed` of earlier requests does not count.
        computed = np.zeros(num_reqs, dtype=np.int64)
        rows = np.repeat(self._rows[:num_reqs], lengths)
        positions = self._rows[:num_tokens] - staging.fields.query_start_loc[rows]
        sharded = self._sharded_step(staging, lengths, computed, rows, positions)
        width = self._tables.shape[2]
        return self._batch(staging, names, counts, longest, longest, width, filled, sharded=sharded)

    def _slot_counts(self, tokens: int, encoder_tokens: int) -> tuple[int, ...]:
        groups = range(len(self.block_sizes))
        return tuple(encoder_tokens if g in self.cross_groups else tokens for g in groups)

    def _commit_step(self, names: list[str], ordered: tuple[Ints, Ints] | None, scheduled: Ints) -> None:
        move = None
        if ordered is not None:
            order, misplaced = ordered
            move = *self._moved(order[misplaced], misplaced), Members(names, self._members.order + 1)
        self._change = functools.partial(self._begin, tuple(names), scheduled, move)
        self._settle()

    def _begin(
        self,
        names: tuple[str, ...],
        scheduled: Ints,
        move: tuple[Ints, Ints, npt.NDArray[np.int32], Members] | None,
    ) -> None:
        if move is not None:
            self._move(*move)
        self._scheduled[: scheduled.size] = scheduled
        self._stepped = names

    def _finish(self, computed: Ints, written: Ints) -> None:
        self._computed[: computed.size] = computed
        self._encoder_written[: written.size] = written
        self._stepped = None

    def _unwritten(self, scheduled: Ints, at: Ints) -> Ints:
        """Encoder tokens of each request that this step writes; `at` are the rows of the requests."""
        lengths = self._encoder_lens[at]
        kept = self._encoder_written[at] | (scheduled == 0)
        return np.where(kept, 0, lengths).astype(np.int64)

    def _sharded_step(
        self, staging: StepStaging, scheduled: Ints, computed: Ints, rows: Ints, positions: Ints
    ) -> ShardedStep | None:
        """The keys on this rank; None without context parallelism."""
        if self.context_parallel is None or not self.sharded_groups:
            return None
        place, groups = self.context_parallel, self.sharded_groups
        return ShardedStep.staged(place, groups, staging, scheduled, computed, rows, positions)

    def _rows_with_placeholders(self, at: Ints, scheduled: Ints, computed: Ints) -> list[int]:
        """The requests that may have placeholders among their scheduled tokens."""
        ahead = (self._placeholder_end[at] > computed) & (scheduled > 0)
        rows: list[int] = np.flatnonzero(ahead).tolist()
        return rows

    def _spans(
        self, names: list[str], at: Ints, starts: npt.NDArray[Any], scheduled: Ints, computed: Ints
    ) -> list[Span]:
        """The placeholders among the scheduled tokens, in order of tokens."""
        spans: list[Span] = []
        for row in self._rows_with_placeholders(at, scheduled, computed):
            tokens = int(computed[row]), int(scheduled[row]), int(starts[row])
            spans += spans_of(names[row], self._placeholders[names[row]], *tokens)
        return spans

    def _batch(
        self,
        staging: StepStaging,
        names: tuple[str, ...],
        counts: tuple[int, ...],
        max_query: int,
        longest: int,
        width: int,
        filled: Mapping[str, int],
        placeholders: Mapping[str, PlaceholderMap] = MappingProxyType({}),
        order: Ints | None = None,
        shared: tuple[int, ...] = (),
        sharded: ShardedStep | None = None,
    ) -> StepBatch:
        reqs, first = len(names), self._self_groups[0] if self._self_groups else 0
        tokens = int(staging.fields.query_start_loc[reqs])
        if self._device_tables is None or staging.tables is None:
            tables = self._tables_cpu[:, :reqs]
        else:
            tables = self._device_tables.send(staging.tables, reqs, width)
        starts, lens, slots = staging.fields.send(reqs, len(counts), max(counts))
        optional = staging.send(filled)
        if "logits_indices_padded" in filled:
            optional["num_logits_indices"] = filled["logits_indices_padded"]
        if self._selection is not None:
            optional["selection"] = self._selection[:tokens]
            # A selection of the step before would be taken for this one's if nobody wrote it.
            optional["selection"].clear()
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=staging.fields.query_start_loc_cpu(reqs),
            seq_lens=lens,
            num_reqs=reqs,
            num_actual_tokens=tokens,
            max_query_len=max_query,
            max_seq_len=longest,
            block_table_tensor=tables[first],
            slot_mapping=slots[first, : counts[first]],
            seq_lens_host=staging.fields.seq_lens[:reqs],
            **optional,
        )
        # All copies of the set are issued, so the event that guards it can be recorded.
        self._ring.release()
        own = self.cross_groups, names, self.block_sizes, placeholders, order, shared, self.kv_cache_specs
        stamps = (self._serial.advance("step"),)
        return StepBatch(common, first, tables, slots, counts, *own, sharded, stamps).sealed()
