"""The persistent buffers of a builder's steps, and the batch that they make of the scheduled tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.kv_cache_spec import MLAAttentionSpec
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.selection import Selection
from attnplug.ops.buffers import StagingRing
from attnplug.runtime.batch.engine_values import Ints
from attnplug.runtime.batch.placeholders import MMPrefix, Span, map_placeholders
from attnplug.runtime.batch.request_rows import RequestRows
from attnplug.runtime.batch.sharded_step import ShardedStep
from attnplug.runtime.batch.slot_mappings import SlotMappings
from attnplug.runtime.batch.staging import StepStaging
from attnplug.runtime.batch.step_batch import StepBatch, StepSerial


class StepBuffers(NotCopied):
    """Two sets of host buffers with their copies on the device, and what fills them.

    Args:
        requests: those in flight, in the order of each step.
        max_num_batched_tokens: most tokens in a step.
        max_encoder_len: longest encoder sequence.
        mm_prefix: the spans of layers with mm_prefix; None without such layers.
        sparse_topk: the width of a step's selection; 0 without sparse layers.
        inputs: the names of the other optional inputs.
        device: of the batches.
    """

    def __init__(
        self,
        requests: RequestRows,
        max_num_batched_tokens: int,
        max_encoder_len: int,
        mm_prefix: MMPrefix | None,
        sparse_topk: int,
        inputs: Collection[str],
        device: torch.device,
    ) -> None:
        self._requests, self._mm_prefix = requests, mm_prefix
        groups, reqs = requests.groups, requests.tables.shape[1]
        self._slots = SlotMappings(requests.tables, groups)
        self.serial = StepSerial()
        slots = max(max_num_batched_tokens, reqs * max_encoder_len)
        sizes = reqs, max_num_batched_tokens, len(groups.block_sizes), slots, device
        tables = requests.device_tables
        has_rows = any(isinstance(groups.specs[group], MLAAttentionSpec) for group in groups.sharded)
        # Two sets: the host fills one while the device may still copy from the other.
        staging = [
            StepStaging(
                *(*sizes, None if tables is None else tables.staging(), inputs),
                *(bool(groups.sharded), has_rows),
            )
            for _ in range(2)
        ]
        self._ring = StagingRing(staging, device)
        # One buffer is enough: the indexer writes it on the device, in the order of the steps.
        self._selection = (
            Selection.allocate(max_num_batched_tokens, sparse_topk, device) if sparse_topk else None
        )
        self._counter = np.arange(max(reqs + 1, slots), dtype=np.int64)
        # On the CPU a batch gets a view of this tensor, so that a step copies no table.
        self._tables = torch.from_numpy(requests.tables)

    def batch(
        self,
        names: tuple[str, ...],
        scheduled: Ints,
        computed: Ints,
        lengths: Ints,
        *,
        max_query: int,
        longest: int,
        width: int,
        has_null_pages: bool,
        values: Mapping[str, Ints],
        unwritten: Ints | None = None,
        spans: Sequence[Span] = (),
        wanted: Ints | None = None,
        order: Ints | None = None,
        shared: tuple[int, ...] = (),
    ) -> StepBatch:
        """The batch of a step.

        Args:
            names: of its requests, which are the first rows of the tables.
            scheduled: new tokens of each request.
            computed: its tokens before them.
            lengths: all its tokens after them.
            max_query: the longest of `scheduled`.
            longest: the longest of `lengths`.
            width: pages of the longest request.
            has_null_pages: whether a new token may be in a null page.
            values: the values of optional inputs with a row for each request, by name.
            unwritten: the encoder tokens of each request that this step writes; None without cross groups.
            spans: placeholders among the new tokens, in order of tokens.
            wanted: of each request, the tokens at its end whose logits are wanted; None without.
            order: see StepBatch.
            shared: see StepBatch.
        """
        requests, groups, reqs = self._requests, self._requests.groups, len(names)
        staging: StepStaging = self._ring.acquire()
        fields, filled = staging.fields, dict[str, int]()
        starts = fields.query_start_loc
        np.cumsum(scheduled, out=starts[1 : reqs + 1])
        tokens = int(starts[reqs])
        fields.seq_lens[:reqs] = lengths
        # Both tests: with two tokens for one request and none for another, the sum is equal too.
        if tokens == reqs and max_query == 1:
            rows, positions = self._counter[:reqs], computed
        else:
            rows = np.repeat(self._counter[:reqs], scheduled)
            positions = self._counter[:tokens] + np.repeat(computed - starts[:reqs], scheduled)
        encoder_tokens = 0 if unwritten is None else int(unwritten.sum())
        counts = (tokens,) * len(groups.block_sizes)
        if unwritten is not None:
            counts = tuple(encoder_tokens if g in groups.cross else tokens for g in range(len(counts)))
        slots = fields.slots(len(counts), max(counts))
        self._slots.fill(slots, rows, positions, has_null_pages)
        if unwritten is not None:
            begins = np.repeat(np.cumsum(unwritten) - unwritten, unwritten)
            encoder_rows, places = np.repeat(self._counter[:reqs], unwritten), self._counter[:encoder_tokens]
            self._slots.fill_encoder(slots, encoder_rows, places - begins, has_null_pages)
        for name, rows_of in values.items():
            staging.inputs[name].np[:reqs] = rows_of
            filled[name] = reqs
        maps = map_placeholders(spans, staging.placeholders) if spans else {}
        if self._mm_prefix is not None:
            self._mm_prefix.fill(spans, staging.inputs["mm_prefix_spans"].np[:tokens])
            filled["mm_prefix_spans"] = tokens
        if wanted is not None:
            ends = np.repeat(starts[1 : reqs + 1] - wanted.cumsum(), wanted)
            indices = staging.inputs["logits_indices_padded"].np[: ends.size]
            np.add(self._counter[: ends.size], ends, out=indices, casting="same_kind")
            filled["logits_indices_padded"] = ends.size
        sharded = None
        if groups.place is not None and groups.sharded:
            own = scheduled, computed, rows, positions
            sharded = ShardedStep.staged(groups.place, groups.sharded, staging, *own)
        if requests.device_tables is None or staging.tables is None:
            tables = self._tables[:, :reqs]
        else:
            tables = requests.device_tables.send(staging.tables, reqs, width)
        sent_starts, lens_sent, slots_sent = fields.send(reqs, len(counts), max(counts))
        optional: dict[str, Any] = staging.send(filled) if filled else {}
        if wanted is not None:
            optional["num_logits_indices"] = filled["logits_indices_padded"]
        if self._selection is not None:
            optional["selection"] = self._selection[:tokens]
            # A selection of the step before would be taken for this one's if nobody wrote it.
            optional["selection"].clear()
        first = groups.decoder[0] if groups.decoder else 0
        common = CommonAttentionMetadata(
            query_start_loc=sent_starts,
            query_start_loc_cpu=fields.query_start_loc_cpu(reqs),
            seq_lens=lens_sent,
            num_reqs=reqs,
            num_actual_tokens=tokens,
            max_query_len=max_query,
            max_seq_len=longest,
            block_table_tensor=tables[first],
            slot_mapping=slots_sent[first, : counts[first]],
            seq_lens_host=fields.seq_lens[:reqs],
            **optional,
        )
        # All copies of the set are issued, so the event that guards it can be recorded.
        self._ring.release()
        own_groups = groups.cross, names, groups.block_sizes, maps, order, shared, groups.specs
        stamps = (self.serial.advance("step"),)
        return StepBatch(common, first, tables, slots_sent, counts, *own_groups, sharded, stamps).sealed()
