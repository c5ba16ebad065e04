"""Makes the batch of each step from the requests in flight, in persistent buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import cast

import numpy as np
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.arguments import instance, integer, integers, listed, torch_device
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import KVCacheSpec
from attnplug.runtime.batch.cascade import shared_prefix_lens
from attnplug.runtime.batch.draft_trees import DraftTree, accepted_tokens, checked_trees
from attnplug.runtime.batch.engine_values import (
    Counts,
    Ints,
    check_at_most,
    check_entries,
    check_rollback,
    check_sizes,
    check_step,
    counts_of,
    numbers,
    spans_of,
)
from attnplug.runtime.batch.kv_groups import KVGroups, first_attended, reach
from attnplug.runtime.batch.placeholders import PlaceholderRanges, check_placeholders
from attnplug.runtime.batch.request_rows import RequestRows
from attnplug.runtime.batch.step_batch import StepBatch
from attnplug.runtime.batch.step_buffers import StepBuffers
from attnplug.runtime.plan.sharding import checked_place


class StepBatchBuilder(NotCopied):
    """Stores the requests in flight, and makes each step's batch without a Python loop over them.

    A call that raises changes nothing, also if an interrupt raises at any line. An interrupted `step` may have ordered
    the requests and count as made; it can be made again.

    Implements the `input_batch` protocol of `reorder_batch_to_split_decodes_and_prefills`: `req_ids`,
    `num_computed_tokens_cpu`, `swap_states`.

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
        reorder_batch_thresholds: Sequence[int] = (),
        mm_prefix: bool = False,
        mm_prefix_modalities: Collection[str] | None = None,
        sparse_topk: int = 0,
        num_blocks: int | None = None,
        kv_cache_specs: Sequence[KVCacheSpec] = (),
        cascade_groups: Collection[int] | None = None,
        context_parallel: ContextParallel | None = None,
        one_pool: bool = False,
    ) -> None:
        self.device = torch_device("device", device)
        thresholds = integers("reorder_batch_thresholds", reorder_batch_thresholds)
        self.reorder_batch_thresholds = tuple(sorted(set(thresholds)))
        self.max_num_seqs = integer("max_num_seqs", max_num_seqs)
        self.max_num_batched_tokens = integer("max_num_batched_tokens", max_num_batched_tokens)
        self.max_model_len = integer("max_model_len", max_model_len)
        self.max_encoder_len = integer("max_encoder_len", max_encoder_len)
        self.block_sizes = tuple(integers("block_sizes", block_sizes))
        self.num_blocks = None if num_blocks is None else integer("num_blocks", num_blocks)
        specs = listed("kv_cache_specs", kv_cache_specs, "KVCacheSpecs")
        self.kv_cache_specs = tuple(instance("kv_cache_specs", spec, KVCacheSpec) for spec in specs)
        self.context_parallel = place = checked_place(context_parallel)
        count = len(self.block_sizes)
        self.cross_groups = numbers("cross_groups", cross_groups, "KV groups", count)
        cascade = range(count) if cascade_groups is None else cascade_groups
        cascade = numbers("cascade_groups", cascade, "KV groups", count)
        sparse_topk = integer("sparse_topk", sparse_topk)
        check_sizes(self, sparse_topk)
        groups = KVGroups.of(self.block_sizes, self.kv_cache_specs, self.cross_groups, place)
        self.sharded_groups = groups.sharded
        """The KV groups whose tokens the ranks share."""
        self.tokens_per_block = groups.tokens_per_block
        """Tokens of a request that one block number covers: those of a page, on all ranks that share them."""
        self._mm_prefix = spans_of(mm_prefix, mm_prefix_modalities, self.max_num_batched_tokens)
        # A prefix of shared blocks has other tokens on each rank, so it is not offered to builders.
        self._cascade_groups = [g for g in groups.decoder if g in cascade and g not in groups.sharded]
        most, tokens = self.max_num_seqs, self.max_num_batched_tokens
        own, encoder = self.max_model_len, self.max_encoder_len
        width = max(
            -(-(encoder if group in groups.cross else own) // size)
            for group, size in enumerate(groups.tokens_per_block)
        )
        check_entries(count * most * width, most, own)
        pool = self.num_blocks, instance("one_pool", one_pool, bool)
        self._requests = RequestRows(groups, most, width, *pool, self.device)
        self._trees: Mapping[str, DraftTree] = {}
        has = {"encoder_seq_lens": groups.cross, "mm_prefix_spans": mm_prefix, "logits_indices_padded": True}
        inputs = [name for name in has if has[name]]
        self._buffers = StepBuffers(
            self._requests, tokens, encoder, self._mm_prefix, sparse_topk, inputs, self.device
        )

    @property
    def req_ids(self) -> list[str]:
        """The names of the requests in flight, in order. A later change makes another list."""
        return self._requests.members.names

    @property
    def num_reqs(self) -> int:
        """Requests in flight."""
        return len(self._requests.members.names)

    @property
    def num_computed_tokens_cpu(self) -> Ints:
        """Tokens with cached K and V, int64 `[R]`; a view of the builder's array."""
        computed: Ints = self._requests.computed[: self.num_reqs]
        return computed

    def add_request(
        self,
        req_id: str,
        block_ids: Sequence[Sequence[int]] = (),
        num_computed_tokens: int = 0,
        encoder_len: int = 0,
        placeholders: PlaceholderRanges | None = None,
        encoder_computed: bool = False,
    ) -> int:
        """Add a request at the end, and return its index.

        Args:
            req_id: its name.
            block_ids: its pages in each KV group. Block 0, the null block, marks pages that its window has
                passed; their tokens are not written.
            num_computed_tokens: tokens already cached, such as a shared prefix.
            encoder_len: encoder tokens that its cross-attention layers attend to.
            placeholders: by modality, `(offset, length)` of the tokens that get the embedding of an item. For
                layers with mm_prefix, each is a span whose tokens see each other.
            encoder_computed: whether the encoder's keys are in their pages already, such as those of the request that
                this one is a fork of. Its steps then write no encoder tokens, and requests may share these pages.

        Raises:
            BatchError: the name is in use, all places are taken, or counts do not fit. No step can compute a span as
                a whole, or a number is not a block of the pool. A block comes twice, or the request would write to
                one that another request has.
        """
        index = self.num_reqs
        instance("req_id", req_id, str)
        if self._requests.find(req_id) is not None:
            raise BatchError("req_id", req_id, "is in flight already")
        if index == self.max_num_seqs:
            raise BatchError("num_reqs", index + 1, f"must not pass max_num_seqs={self.max_num_seqs}")
        num_computed_tokens = integer("num_computed_tokens", num_computed_tokens)
        encoder_len = integer("encoder_len", encoder_len)
        if not 0 <= num_computed_tokens < self.max_model_len:
            limit = f"must be in 0 .. {self.max_model_len - 1}"
            raise BatchError("num_computed_tokens", num_computed_tokens, limit)
        if encoder_len and not self.cross_groups:
            raise BatchError("encoder_len", encoder_len, "needs a builder with cross_groups")
        if not 0 <= encoder_len <= self.max_encoder_len:
            raise BatchError("encoder_len", encoder_len, f"must be in 0 .. {self.max_encoder_len}")
        items = check_placeholders({} if placeholders is None else placeholders, self.max_model_len)
        if self._mm_prefix is not None:
            self._mm_prefix.check_request(items, num_computed_tokens)
        instance("encoder_computed", encoder_computed, bool)
        computed = num_computed_tokens
        pages = self._requests.pages(block_ids, index, computed, True, encoder_computed)
        encoder = encoder_len, bool(encoder_len and encoder_computed)
        return self._requests.add(req_id, computed, encoder, items, pages, self.max_model_len)

    def append_blocks(self, req_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """Give a request more pages: a sequence of block numbers for each KV group.

        Raises:
            BatchError: the request is not in flight, or there is not one sequence per group. The table has fewer
                pages, or a number is not a block of the pool. It has a block already, or would write to one of another
                request.
        """
        index = self._requests.row_of(req_id)
        pages = self._requests.pages(block_ids, index, int(self._requests.computed[index]))
        self._requests.append(index, pages, self.max_model_len)

    def free_blocks(self, req_id: str, group: int, num_blocks: int) -> None:
        """Replace a request's first pages in one KV group, which its window has passed, by the null block.

        The request keeps its positions; other requests can then use the pages.

        Raises:
            BatchError: the request is not in flight, or the group has no decoder tokens. A page has tokens that
                are not yet computed or are still attended.
        """
        requests, index = self._requests, self._requests.row_of(req_id)
        group, num_blocks = integer("group", group), integer("num_blocks", num_blocks)
        if group not in requests.groups.decoder:
            decoder = list(requests.groups.decoder)
            raise BatchError("group", group, f"must be a KV group of decoder tokens: {decoder}")
        passed, which = requests.computed[index : index + 1], "the pages computed in full"
        if self.kv_cache_specs:
            spec = self.kv_cache_specs[group]
            passed, which = first_attended(spec, passed), f"the pages that {reach(spec)} has passed"
        limit = min(int(passed[0]) // self.tokens_per_block[group], int(requests.num_blocks[group, index]))
        if not 0 <= num_blocks <= limit:
            raise BatchError("num_blocks", num_blocks, f"must be in 0 .. {limit}, {which}")
        if num_blocks:
            self._buffers.serial.advance("free_blocks")
        requests.free(index, group, num_blocks)

    def remove_request(self, req_id: str) -> None:
        """Remove a request; the last request moves to its index."""
        index = self._requests.row_of(req_id)
        # First: after an interrupt, a batch that is refused in vain does no harm, and one of a former order would.
        self._buffers.serial.advance("remove_request")
        self._requests.remove(req_id, index)

    def swap_states(self, i: int, j: int) -> None:
        """Exchange two requests; BatchError for an index without a request."""
        i, j, reqs = integer("i", i), integer("j", j), self.num_reqs
        for name, index in (("i", i), ("j", j)):
            if not 0 <= index < reqs:
                raise BatchError(name, index, f"must be the index of one of {reqs} requests")
        self._buffers.serial.advance("swap_states")
        self._requests.swap(i, j)

    def step(
        self,
        num_scheduled_tokens: Counts = 1,
        num_logits: Counts | None = None,
        trees: Mapping[str, Sequence[int]] | None = None,
    ) -> StepBatch:
        """The batch that runs the scheduled tokens of every request.

        Each request in flight is in the batch. One without scheduled tokens has a query of length 0 and no rows.

        Args:
            num_scheduled_tokens: new tokens by request, or a sequence in the order of `req_ids`, or one number
                for all. A request that a mapping leaves out runs 0 tokens. The step may then change the order:
                see `StepBatch.req_ids` and `order`.
            num_logits: the tokens at each request's end whose logits are wanted, in the same form: 0 for a prompt
                that later steps complete, 1 to draw a token, more to verify drafts. Their rows are the batch's
                `logits_indices_padded`. None leaves it out; layers of fast prefill then compute all tokens.
            trees: by request, the parent of each of its scheduled tokens, which are then a tree of drafts: -1 for a token
                that follows the computed ones, else the number of an earlier token. Each token sees the computed ones,
                its ancestors and itself. `StepBatch.positions` has the positions of all tokens.

        Raises:
            BatchError: a mapping names a request that is not in flight; a sequence has counts of another number of
                requests; counts are negative; there are too many tokens; more logits than tokens are wanted; a
                sequence is longer than max_model_len; a request has no pages for its tokens, or null blocks among
                them; a multimodal span is split. A tree is of another size than its scheduled tokens, or has a
                parent that is not before its node. Ranks share the tokens of a tree.
        """
        requests, names = self._requests, self.req_ids
        reqs = len(names)
        scheduled = counts_of("num_scheduled_tokens", num_scheduled_tokens, names)
        computed = requests.computed[:reqs]
        lengths, limits = computed + scheduled, (self.max_num_batched_tokens, self.max_model_len)
        max_query, longest = check_step(requests, scheduled, lengths, *limits)
        wanted = None if num_logits is None else counts_of("num_logits", num_logits, names)
        if wanted is not None:
            check_at_most("num_logits", wanted, scheduled, names, "scheduled tokens")
        drafts = None if trees is None else checked_trees(trees, names, scheduled)
        if drafts and (self.sharded_groups or self._mm_prefix is not None):
            limit = "cannot be verified: " + (
                "ranks share the tokens" if self.sharded_groups else "layers have mm_prefix"
            )
            raise BatchError("trees", sorted(drafts), limit, "verify drafts as a chain, without trees")
        if self._mm_prefix is not None and requests.placeholders:
            for row in requests.with_placeholders(scheduled):
                tokens_of = int(computed[row]), int(scheduled[row])
                self._mm_prefix.check_step(names[row], requests.placeholders[names[row]], *tokens_of)
        # All checks come before this line, because a step that is refused moves nothing.
        ordered, order = requests.ordered(scheduled, self.reorder_batch_thresholds), None
        if ordered is not None:
            order = ordered[0]
            scheduled, lengths = scheduled[order], lengths[order]
            wanted = None if wanted is None else wanted[order]
        stepped, unwritten = requests.begin(scheduled, ordered), None
        self._trees = drafts or {}
        tables, values = requests.tables[:, :reqs], dict[str, Ints]()
        shared = shared_prefix_lens(tables, self.block_sizes, computed, self._cascade_groups)
        if self.cross_groups:
            lens = values["encoder_seq_lens"] = requests.encoder_lens[:reqs]
            unwritten = np.where(requests.encoder_written[:reqs] | (scheduled == 0), 0, lens)
        return self._buffers.batch(
            stepped,
            scheduled,
            computed,
            lengths,
            max_query=max_query,
            longest=longest,
            width=int(requests.num_blocks[:, :reqs].max(initial=1)),
            has_null_pages=requests.has_null_pages,
            values=values,
            unwritten=unwritten,
            spans=requests.spans(scheduled) if requests.placeholders else (),
            wanted=wanted,
            order=order,
            shared=shared,
            trees=drafts,
        )

    def finish_step(self, accepted: Counts | None = None) -> None:
        """Count the last step's tokens as computed: all, or only the accepted speculative ones.

        If requests were added, removed or swapped since the step, `accepted` must be a mapping by request. A mapping
        may leave out the requests that ran 0 tokens. For a request with a tree, it has the last node of the accepted
        path, or -1 for none. `AttentionRuntime.keep_path` comes first, because the path's keys are among those of others.

        Raises:
            BatchError: no step was begun, counts of another number of requests, or more tokens are
                accepted than scheduled. A tree has no node, or the keys of its path were not moved.
        """
        requests, names = self._requests, self.req_ids
        if requests.stepped is None:
            raise BatchError("step", None, "is required before finish_step, once for each")
        scheduled = counts = requests.scheduled[: len(names)]
        if self._trees:
            in_flight = {name: tree for name, tree in self._trees.items() if name in set(names)}
            tokens = accepted_tokens(in_flight, accepted)
            accepted = {**cast("Mapping[str, int]", accepted), **tokens}
        if accepted is not None:
            # A plain sequence is in the order of the step, which these requests no longer have.
            if not isinstance(accepted, (Mapping, int)) and requests.stepped != tuple(names):
                limit = "has no order: requests changed since the step"
                remedy = "give the counts by request, as a mapping"
                raise BatchError("accepted", accepted, limit, remedy)
            counts = counts_of("accepted", accepted, names, scheduled)
            check_at_most("accepted", counts, scheduled, names, "scheduled tokens")
        requests.finish(counts)

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
        requests, names = self._requests, self.req_ids
        if requests.stepped is not None:
            raise BatchError("step", "not finished", "cannot be rolled back", "call finish_step first")
        computed, served = requests.computed[: len(names)], requests.first_served[: len(names)]
        counts = counts_of("num_tokens", num_tokens, names, computed)
        check_at_most("num_tokens", counts, computed, names, "computed tokens")
        bad = (counts > 0) & (computed - counts < served)
        if bad.any():
            worst = int(bad.argmax())
            limit = f"of request {names[worst]} goes to before token {served[worst]}, where pages were freed"
            raise BatchError(
                "num_tokens", int(counts[worst]), limit, "free pages after the drafts are verified"
            )
        check_rollback(requests, computed - counts, computed)
        # `computed` is a view of the requests' own numbers, so this one statement is the change.
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
        encoder = np.full(num_reqs, self.max_encoder_len, dtype=np.int64)
        # Old requests leave their pages in the rows; a profile run must read the null block only.
        self._requests.tables[:, :num_reqs] = 0
        self._requests.changed(slice(None), slice(num_reqs), 0, self._requests.tables.shape[2])
        return self._buffers.batch(
            tuple(f"profile-{index}" for index in range(num_reqs)),
            lengths,
            # From the start, so the numbers of earlier requests do not count.
            np.zeros(num_reqs, dtype=np.int64),
            lengths,
            max_query=int(lengths[0]),
            longest=int(lengths[0]),
            width=self._requests.tables.shape[2],
            has_null_pages=True,
            values={"encoder_seq_lens": encoder} if self.cross_groups else {},
            unwritten=encoder if self.cross_groups else None,
        )
