"""The requests in flight, with lengths and block tables in arrays, and the buffers of their steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.context_parallel import ContextParallel
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import KVCacheSpec, MLAAttentionSpec
from attnplug.core.selection import Selection
from attnplug.ops.buffers import StagingRing
from attnplug.runtime.arguments import instance, integer, integers, listed, torch_device
from attnplug.runtime.block_numbers import block_numbers
from attnplug.runtime.device_tables import DeviceTables
from attnplug.runtime.null_blocks import first_attended, reach
from attnplug.runtime.placeholders import Placeholder, PlaceholderRanges, check_placeholders
from attnplug.runtime.request_limits import check_entries, check_sizes, numbers, spans_of
from attnplug.runtime.sharding import checked_place, shares_tokens, tokens_per_block
from attnplug.runtime.slot_mappings import SlotMappings
from attnplug.runtime.staging import StepStaging
from attnplug.runtime.step_serial import StepSerial

_Ints = npt.NDArray[np.int64]


class RequestTable:
    """Requests in order, each with its pages in every KV group.

    Implements the `input_batch` protocol of `reorder_batch_to_split_decodes_and_prefills`: `req_ids`,
    `num_computed_tokens_cpu`, `swap_states`. Arguments are those of `StepBatchBuilder`. A call that raises
    changes nothing.
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
        self._tables = np.zeros((groups, max_num_seqs, width), dtype=np.int32)
        # On the CPU a batch gets a view of this tensor, so that a step copies no table.
        self._tables_cpu = torch.from_numpy(self._tables)
        self._num_blocks = np.zeros((groups, max_num_seqs), dtype=np.int64)
        # One past the last null page of each request, 0 without any.
        self._null_ends = np.zeros((groups, max_num_seqs), dtype=np.int64)
        # Without null pages, the flag spares each step a pass over its slots.
        self._has_null_pages = False
        covered = self.block_sizes, self.tokens_per_block, self.cross_groups, self.sharded_groups
        self._slots = SlotMappings(self._tables, *covered, self.context_parallel)
        self._capacity = np.zeros(max_num_seqs, dtype=np.int64)
        self._computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._scheduled = np.zeros(max_num_seqs, dtype=np.int64)
        # Queries of this position and later ones need no page that was freed; earlier ones may.
        self._first_served = np.zeros(max_num_seqs, dtype=np.int64)
        self._encoder_lens = np.zeros(max_num_seqs, dtype=np.int32)
        self._encoder_written = np.zeros(max_num_seqs, dtype=bool)
        self._placeholder_end = np.zeros(max_num_seqs, dtype=np.int64)
        self._placeholders: dict[str, tuple[Placeholder, ...]] = {}
        self._serial = StepSerial()
        self.req_ids: list[str] = []
        self._index: dict[str, int] = {}
        slots = max(max_num_batched_tokens, max_num_seqs * max_encoder_len)
        sizes = max_num_seqs, max_num_batched_tokens, groups, slots, self.device
        # On the CPU steps read the builder's own tables.
        self._device_tables = None if self.device.type == "cpu" else DeviceTables(self._tables, self.device)
        # Two sets: the host fills one while the device may still copy from the other.
        has_rows = any(isinstance(self.kv_cache_specs[g], MLAAttentionSpec) for g in self.sharded_groups)
        forms = mm_prefix, bool(self.sharded_groups), has_rows
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
    def num_reqs(self) -> int:
        """Requests in flight."""
        return len(self.req_ids)

    @property
    def num_computed_tokens_cpu(self) -> _Ints:
        """Tokens with cached K and V, int64 `[R]`; a view of the builder's array."""
        return self._computed[: self.num_reqs]

    def add_request(
        self,
        req_id: str,
        block_ids: Sequence[Sequence[int]] = (),
        num_computed_tokens: int = 0,
        encoder_len: int = 0,
        placeholders: PlaceholderRanges | None = None,
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

        Raises:
            BatchError: the name is in use, all places are taken, counts do not fit, no step can compute a span
                as a whole, or a number is not a block of the pool.
        """
        index = self.num_reqs
        instance("req_id", req_id, str)
        if req_id in self._index:
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
        # The pages are checked before the first write, because a call that raises changes nothing.
        pages = self._pages(block_ids, index, fresh=True)
        self.req_ids.append(req_id)
        self._index[req_id] = index
        self._computed[index] = num_computed_tokens
        self._scheduled[index] = self._first_served[index] = 0
        self._encoder_lens[index] = encoder_len
        self._encoder_written[index] = False
        self._placeholder_end[index] = items[-1].offset + items[-1].length if items else 0
        if items:
            self._placeholders[req_id] = items
        self._num_blocks[:, index] = self._null_ends[:, index] = 0
        # Without decoder pages, as in models of cross attention only, no page limits the length.
        self._capacity[index] = 0 if self._self_groups else self.max_model_len
        if pages:
            self._put(pages, index)
        return index

    def append_blocks(self, req_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """Give a request more pages: a sequence of block numbers for each KV group.

        Raises:
            BatchError: the request is not in flight, there is not one sequence per group, the table has fewer
                pages, or a number is not a block of the pool.
        """
        index = self._at(req_id)
        self._put(self._pages(block_ids, index), index)

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
        if self._tables[group, index, :num_blocks].any():
            self._first_served[index] = self._computed[index]
        self._tables[group, index, :num_blocks] = 0
        self._changed(group, index, 0, num_blocks)
        self._null_ends[group, index] = max(num_blocks, self._null_ends[group, index])

    def remove_request(self, req_id: str) -> None:
        """Remove a request; the last request moves to its index."""
        index, last = self._at(req_id), self.num_reqs - 1
        if index != last:
            self.swap_states(index, last)
        self._serial.advance("remove_request")
        self.req_ids.pop()
        del self._index[req_id]
        self._placeholders.pop(req_id, None)

    def swap_states(self, i: int, j: int) -> None:
        """Exchange two requests; BatchError for an index without a request."""
        i, j = integer("i", i), integer("j", j)
        for name, index in (("i", i), ("j", j)):
            if not 0 <= index < self.num_reqs:
                raise BatchError(name, index, f"must be the index of one of {self.num_reqs} requests")
        self._serial.advance("swap_states")
        self._move(np.array([j, i]), np.array([i, j]))

    def _put_in_order(self, scheduled: _Ints) -> _Ints | None:
        """Move decodes to the front, as every threshold has it, then extends, then prefills.

        Requests whose place is right stay there, so the fewest possible move. Returns the index that each
        request had before, int64 `[R]`; None if no request moved.
        """
        if not self.reorder_batch_thresholds:
            return None
        # A decode is a short query, of a new request too. A query past a threshold comes after all within it.
        rank = np.searchsorted(self.reorder_batch_thresholds, scheduled)
        rank[(rank == len(self.reorder_batch_thresholds)) & (self._computed[: self.num_reqs] == 0)] += 1
        misplaced = np.flatnonzero(rank != np.sort(rank))
        if not misplaced.size:
            return None
        order = self._rows[: self.num_reqs].copy()
        order[misplaced] = misplaced[np.argsort(rank[misplaced], kind="stable")]
        self._move(order[misplaced], misplaced)
        return order

    def _move(self, sources: _Ints, targets: _Ints) -> None:
        """Move the requests at `sources` to `targets`, which are the same indices in another order."""
        counts = self._computed, self._scheduled, self._first_served, self._capacity, self._num_blocks
        for array in (
            *counts,
            self._null_ends,
            self._encoder_lens,
            self._encoder_written,
            self._placeholder_end,
        ):
            array[..., targets] = array[..., sources]
        # Entries past a request's blocks are never followed, so they need not move.
        width = int(self._num_blocks[:, targets].max(initial=0))
        self._tables[:, targets, :width] = self._tables[:, sources, :width]
        self._changed(slice(None), targets, 0, width)
        names = [self.req_ids[source] for source in sources.tolist()]
        for target, name in zip(targets.tolist(), names, strict=True):
            self.req_ids[target] = name
            self._index[name] = target

    def _changed(self, groups: int | slice, rows: int | slice | _Ints, first: int, last: int) -> None:
        """The columns `first .. last` of these tables changed, so the device's copy needs them."""
        if self._device_tables is not None:
            self._device_tables.changed(groups, rows, first, last)

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
        index = self._index.get(req_id) if isinstance(req_id, str) else None
        if index is None:
            raise BatchError("req_id", req_id, "is not in flight")
        return index

    def _pages(
        self, block_ids: Sequence[Sequence[int]], index: int, fresh: bool = False
    ) -> list[tuple[int, _Ints]]:
        """The start and the block numbers of each group's new pages, none for `()` if fresh; changes nothing."""
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
        pages = []
        for group, ids in enumerate(block_ids):
            field = f"block_ids[{group}]"
            blocks = block_numbers(field, ids, self.num_blocks)
            start = 0 if fresh else int(self._num_blocks[group, index])
            if start + blocks.size > self._tables.shape[2]:
                limit = f"pages are past the table's {self._tables.shape[2]}"
                raise BatchError(field, start + blocks.size, limit)
            pages.append((start, blocks))
        return pages

    def _put(self, pages: Sequence[tuple[int, _Ints]], index: int) -> None:
        for group, (start, blocks) in enumerate(pages):
            end = start + blocks.size
            self._tables[group, index, start:end] = blocks
            self._changed(group, index, start, end)
            self._num_blocks[group, index] = end
            if not blocks.all():
                self._has_null_pages = True
                self._null_ends[group, index] = start + np.flatnonzero(blocks == 0)[-1] + 1
                self._first_served[index] = self._computed[index]
        tokens = [int(self._num_blocks[g, index]) * self.tokens_per_block[g] for g in self._self_groups]
        self._capacity[index] = min(tokens, default=self.max_model_len)
