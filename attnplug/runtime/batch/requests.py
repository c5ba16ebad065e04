"""The requests in flight, with lengths and block tables in arrays, and the buffers of their steps."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.arguments import instance, integer, integers, listed, torch_device
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import KVCacheSpec, MLAAttentionSpec
from attnplug.core.selection import Selection
from attnplug.ops.buffers import StagingRing
from attnplug.runtime.batch.engine_values import (
    block_numbers,
    check_entries,
    check_sizes,
    first_attended,
    numbers,
    reach,
    spans_of,
)
from attnplug.runtime.batch.placeholders import PlaceholderRanges, check_placeholders
from attnplug.runtime.batch.request_rows import Members, Pages, RequestRows
from attnplug.runtime.batch.slot_mappings import SlotMappings
from attnplug.runtime.batch.staging import StepStaging
from attnplug.runtime.batch.step_batch import StepSerial
from attnplug.runtime.plan.sharding import checked_place, shares_tokens, tokens_per_block

_Ints = npt.NDArray[np.int64]


class RequestTable(RequestRows):
    """Requests in order, each with its pages in every KV group.

    Implements the `input_batch` protocol of `reorder_batch_to_split_decodes_and_prefills`: `req_ids`,
    `num_computed_tokens_cpu`, `swap_states`. Arguments are those of `StepBatchBuilder`. A call that raises, or is
    interrupted, changes nothing.
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
        self.max_num_seqs = max_num_seqs = integer("max_num_seqs", max_num_seqs)
        max_num_batched_tokens = integer("max_num_batched_tokens", max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len = integer("max_model_len", max_model_len)
        self.max_encoder_len = max_encoder_len = integer("max_encoder_len", max_encoder_len)
        self.block_sizes = tuple(integers("block_sizes", block_sizes))
        self.num_blocks = None if num_blocks is None else integer("num_blocks", num_blocks)
        specs = listed("kv_cache_specs", kv_cache_specs, "KVCacheSpecs")
        self.kv_cache_specs = tuple(instance("kv_cache_specs", spec, KVCacheSpec) for spec in specs)
        self.context_parallel = checked_place(context_parallel)
        groups = len(self.block_sizes)
        self.cross_groups = numbers("cross_groups", cross_groups, "KV groups", groups)
        if cascade_groups is not None:
            cascade_groups = numbers("cascade_groups", cascade_groups, "KV groups", groups)
        sparse_topk = integer("sparse_topk", sparse_topk)
        check_sizes(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_sizes=self.block_sizes,
            num_blocks=self.num_blocks,
            thresholds=self.reorder_batch_thresholds,
            sparse_topk=sparse_topk,
            max_encoder_len=max_encoder_len,
            has_cross_groups=bool(self.cross_groups),
            specs=self.kv_cache_specs,
        )
        self.tokens_per_block = self._tokens_per_block()
        """Tokens of a request that one block number covers: those of a page, on all ranks that share them."""
        self._mm_prefix = spans_of(mm_prefix, mm_prefix_modalities, max_num_batched_tokens)
        self._self_groups = [g for g in range(groups) if g not in self.cross_groups]
        self.sharded_groups = self._sharded_groups()
        """The KV groups whose tokens the ranks share."""
        # A prefix of shared blocks has other tokens on each rank, so no builder is asked about it.
        may_cascade = [g for g in self._self_groups if g not in self.sharded_groups]
        self._cascade_groups = [g for g in may_cascade if cascade_groups is None or g in cascade_groups]
        lengths = [max_encoder_len if g in self.cross_groups else max_model_len for g in range(groups)]
        width = max(-(-length // size) for length, size in zip(lengths, self.tokens_per_block, strict=True))
        check_entries(groups * max_num_seqs * width, max_num_seqs, max_model_len)
        super().__init__((groups, max_num_seqs, width), self.num_blocks, one_pool, self.device)
        covered = self.block_sizes, self.tokens_per_block, self.cross_groups, self.sharded_groups
        self._slots = SlotMappings(self._tables, *covered, self.context_parallel)
        self._serial = StepSerial()
        slots = max(max_num_batched_tokens, max_num_seqs * max_encoder_len)
        sizes = max_num_seqs, max_num_batched_tokens, groups, slots, self.device
        # Two sets: the host fills one while the device may still copy from the other.
        has_rows = any(isinstance(self.kv_cache_specs[g], MLAAttentionSpec) for g in self.sharded_groups)
        has = {
            "encoder_seq_lens": bool(self.cross_groups),
            "mm_prefix_spans": mm_prefix,
            "logits_indices_padded": True,
        }
        forms = [name for name in has if has[name]], bool(self.sharded_groups), has_rows
        tables = self._device_tables
        staging = [
            StepStaging(*sizes, None if tables is None else tables.staging(), *forms) for _ in range(2)
        ]
        self._ring = StagingRing(staging, self.device)
        # One buffer is enough: the indexer writes it on the device, in the order of the steps.
        self._selection = (
            Selection.allocate(max_num_batched_tokens, sparse_topk, self.device) if sparse_topk else None
        )
        self._rows = np.arange(max(max_num_seqs + 1, slots), dtype=np.int64)

    @property
    def num_computed_tokens_cpu(self) -> _Ints:
        """Tokens with cached K and V, int64 `[R]`; a view of the builder's array."""
        computed: _Ints = self._computed[: self.num_reqs]
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
            BatchError: the name is in use, all places are taken, counts do not fit, no step can compute a span
                as a whole, or a number is not a block of the pool. A block comes twice, or the request would write to
                one that another request has.
        """
        index = self.num_reqs
        instance("req_id", req_id, str)
        if self._find(req_id) is not None:
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
        pages = self._pages(
            block_ids, index, num_computed_tokens, fresh=True, encoder_computed=encoder_computed
        )
        numbers = self._numbers[:, index]
        numbers[:] = 0
        numbers[0] = num_computed_tokens
        if encoder_len:
            numbers[4], numbers[5] = encoder_len, encoder_computed
        if items:
            numbers[6] = items[-1].offset + items[-1].length
        if pages or not self._self_groups:
            # Without decoder pages, as in models of cross attention only, no page limits the length.
            self._count_pages(index, pages, self._put(pages, index))
        self._index[req_id] = index
        if items:
            self._placeholders[req_id] = items
        else:
            self._placeholders.pop(req_id, None)
        members = Members([*self._members.names, req_id], self._members.order + 1)
        change = functools.partial(self._enter, members, pages)
        # On one line, so that an interrupt is before both.
        self._change = change; return index  # fmt: skip  # noqa: E702

    def append_blocks(self, req_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """Give a request more pages: a sequence of block numbers for each KV group.

        Raises:
            BatchError: the request is not in flight, there is not one sequence per group, the table has fewer
                pages, or a number is not a block of the pool. It has a block already, or would write to one of another
                request.
        """
        index = self._at(req_id)
        pages = self._pages(block_ids, index, int(self._computed[index]))
        self._change = functools.partial(self._append, index, pages, self._put(pages, index))

    def free_blocks(self, req_id: str, group: int, num_blocks: int) -> None:
        """Replace a request's first pages in one KV group, which its window has passed, by the null block.

        The request keeps its positions; other requests can then use the pages.

        Raises:
            BatchError: the request is not in flight, the group has no decoder tokens, or a page has tokens that
                are not yet computed or are still attended.
        """
        index = self._at(req_id)
        group, num_blocks = integer("group", group), integer("num_blocks", num_blocks)
        if group not in self._self_groups:
            raise BatchError("group", group, f"must be a KV group of decoder tokens: {self._self_groups}")
        passed, which = self._computed[index : index + 1], "the pages computed in full"
        if self.kv_cache_specs:
            spec = self.kv_cache_specs[group]
            passed, which = first_attended(spec, passed), f"the pages that {reach(spec)} has passed"
        limit = min(int(passed[0]) // self.tokens_per_block[group], int(self._num_blocks[group, index]))
        if not 0 <= num_blocks <= limit:
            raise BatchError("num_blocks", num_blocks, f"must be in 0 .. {limit}, {which}")
        if num_blocks:
            self._serial.advance("free_blocks")
        # `_has_null_pages` stays as it is: steps write after computed tokens only, never to these pages.
        freed, numbers = self._tables[group, index, :num_blocks].copy(), self._numbers[:, index].copy()
        if freed.any():
            numbers[3] = self._computed[index]
        at = 7 + len(self.block_sizes) + group
        numbers[at] = max(num_blocks, numbers[at])
        holders = self._holders.taken(group, freed)
        self._change = functools.partial(self._free, index, group, freed, holders, numbers)

    def remove_request(self, req_id: str) -> None:
        """Remove a request; the last request moves to its index."""
        index, names = self._at(req_id), self._members.names
        held = []
        for group, size in enumerate(self._num_blocks[:, index].tolist()):
            blocks = self._tables[group, index, :size].copy()
            held.append((blocks, self._holders.taken(group, blocks)))
        move, left = None, names[:-1]
        if index < len(left):
            left[index] = names[-1]
            move = self._moved(np.array([len(left)]), np.array([index]))
        members = Members(left, self._members.order + 1)
        self._serial.advance("remove_request")
        self._change = functools.partial(self._leave, req_id, held, move, members)

    def swap_states(self, i: int, j: int) -> None:
        """Exchange two requests; BatchError for an index without a request."""
        i, j, reqs = integer("i", i), integer("j", j), self.num_reqs
        for name, index in (("i", i), ("j", j)):
            if not 0 <= index < reqs:
                raise BatchError(name, index, f"must be the index of one of {reqs} requests")
        targets, names = [i, j], self._members.names.copy()
        names[i], names[j] = names[j], names[i]
        move = self._moved(np.array([j, i]), np.array(targets))
        members = Members(names, self._members.order + 1)
        self._serial.advance("swap_states")
        self._change = functools.partial(self._move, *move, members)

    def _ordered(self, scheduled: _Ints) -> tuple[_Ints, _Ints] | None:
        """The order with decodes in front, as every threshold has it, then extends, then prefills.

        Requests whose place is right stay there, so the fewest possible move. Returns the index that each request has
        now, int64 `[R]`, and the places of those that move; None if no request moves.
        """
        if not self.reorder_batch_thresholds:
            return None
        # A decode is a short query, of a new request too. A query past a threshold comes after all within it.
        rank = np.searchsorted(self.reorder_batch_thresholds, scheduled)
        rank[(rank == len(self.reorder_batch_thresholds)) & (self._computed[: scheduled.size] == 0)] += 1
        misplaced = np.flatnonzero(rank != np.sort(rank))
        if not misplaced.size:
            return None
        order = self._rows[: scheduled.size].copy()
        order[misplaced] = misplaced[np.argsort(rank[misplaced], kind="stable")]
        return order, misplaced

    def _sharded_groups(self) -> frozenset[int]:
        place = self.context_parallel
        shared = [
            g for g, spec in enumerate(self.kv_cache_specs) if place is not None and shares_tokens(spec)
        ]
        for group in shared:
            if place is not None and self.block_sizes[group] % place.interleave:
                limit = f"must divide block_sizes[{group}]={self.block_sizes[group]}"
                raise BatchError("context_parallel.interleave", place.interleave, limit)
        return frozenset(shared)

    def _tokens_per_block(self) -> tuple[int, ...]:
        place = self.context_parallel
        if place is None:
            return self.block_sizes
        if not self.kv_cache_specs:
            limit = "needs kv_cache_specs: ranks share the tokens of some kinds of groups only"
            raise BatchError("context_parallel", place, limit)
        return tuple(tokens_per_block(spec, place) for spec in self.kv_cache_specs)

    def _at(self, req_id: str) -> int:
        index = self._find(req_id) if isinstance(req_id, str) else None
        if index is None:
            raise BatchError("req_id", req_id, "is not in flight")
        return index

    def _pages(
        self,
        block_ids: Sequence[Sequence[int]],
        index: int,
        computed: int,
        fresh: bool = False,
        encoder_computed: bool = False,
    ) -> list[Pages]:
        """The new pages of each group, none for `()` if fresh; changes nothing."""
        groups = len(self.block_sizes)
        limit = f"must have one sequence for each of {groups} KV groups"
        try:
            given = len(block_ids)
        except Exception:  # noqa: BLE001  (`__len__` is code of the caller, and tensors have limits of their own)
            raise BatchError("block_ids", block_ids, limit) from None
        if isinstance(block_ids, (str, bytes, Mapping)):
            raise BatchError("block_ids", block_ids, limit)
        if given == 0 and fresh:
            return []
        if given != groups:
            raise BatchError("block_ids", given, limit)
        found: list[tuple[int, _Ints]] = []
        for group, ids in enumerate(block_ids):
            field = f"block_ids[{group}]"
            blocks = block_numbers(field, ids, self.num_blocks)
            start = 0 if fresh else int(self._num_blocks[group, index])
            if start + blocks.size > self._tables.shape[2]:
                limit = f"pages are past the table's {self._tables.shape[2]}"
                raise BatchError(field, start + blocks.size, limit)
            found.append((start, blocks))
        pages: list[Pages] = []
        for group, (start, blocks) in enumerate(found):
            read = computed // self.tokens_per_block[group] - start
            if group in self.cross_groups:
                # Encoder tokens are written by the first step of a request, so all their pages are.
                read = blocks.size if encoder_computed else 0
            held = self._holders.given(group, index, start, blocks, max(read, 0))
            null_end = 0
            if np.count_nonzero(blocks) < blocks.size:
                null_end = start + int(np.flatnonzero(blocks == 0)[-1]) + 1
            pages.append((start, start + blocks.size, blocks, held, null_end))
        if self._holders.has_one_pool:
            self._holders.look_for_crossed([blocks for _, blocks in found])
        return pages

    def _put(self, pages: Sequence[Pages], index: int) -> int:
        """Write pages past those that a request uses, and return the tokens that it then has room for."""
        for group, (start, end, blocks, _, _) in enumerate(pages):
            self._tables[group, index, start:end] = blocks
            self._changed(group, index, start, end)
        tokens = [pages[g][1] * self.tokens_per_block[g] for g in self._self_groups]
        return min(tokens, default=self.max_model_len)
