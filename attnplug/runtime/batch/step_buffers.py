"""The persistent buffers of a builder's steps, and the batch that they make of the scheduled tokens.

The slots that a step's tokens are written to, in each KV group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug._system.one_commit import NotCopied
from attnplug.core.batch.context_parallel import local_offsets
from attnplug.core.kv_cache_spec import MLAAttentionSpec
from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.core.selection import Selection
from attnplug.ops.buffers import StagingRing
from attnplug.runtime.batch.draft_trees import DraftTree
from attnplug.runtime.batch.engine_values import Ints
from attnplug.runtime.batch.kv_groups import KVGroups
from attnplug.runtime.batch.placeholders import MMPrefix, Span, map_placeholders
from attnplug.runtime.batch.request_rows import RequestRows
from attnplug.runtime.batch.sharded_step import ShardedStep
from attnplug.runtime.batch.staging import StepStaging
from attnplug.runtime.batch.step_batch import HostRows, StepBatch, StepSerial


class SlotMappings(NotCopied):
    """Computes slots from the host block tables of all requests.

    Args:
        tables: int32 `[G, max_num_seqs, max_blocks]`, read at each call.
        groups: the KV groups.
    """

    def __init__(self, tables: npt.NDArray[np.int32], groups: KVGroups) -> None:
        self._tables, self._groups = tables, groups
        self._flat_tables = tables.reshape(tables.shape[0], -1)
        # Groups with one block size share page and offset, so one look-up serves all of them.
        self._is_uniform = not groups.cross and not groups.sharded and len(set(groups.block_sizes)) == 1

    def fill(self, slots: Ints, rows: Ints, positions: Ints, has_null_pages: bool) -> None:
        """Fill the slots of a step's tokens in the groups of decoder tokens.

        Args:
            slots: int64 `[G, at least T]`, to be filled.
            rows: the request of each token, `[T]`.
            positions: of each token in its sequence, `[T]`.
            has_null_pages: whether any token may be in a null page, which no request may write: its slot is -1.
        """
        tokens = positions.size
        if not self._is_uniform:
            for group in self._groups.decoder:
                self._put(slots[group, :tokens], group, rows, positions, has_null_pages)
            return
        size = self._groups.block_sizes[0]
        page, offset = _divided(positions, size)
        page += rows * self._tables.shape[2]
        # Block numbers are int32, but their slots may exceed it.
        np.multiply(self._flat_tables.take(page, axis=1), size, out=slots, dtype=np.int64)
        slots += offset
        if has_null_pages:
            slots[slots < size] = PAD_SLOT_ID

    def fill_encoder(self, slots: Ints, rows: Ints, positions: Ints, has_null_pages: bool) -> None:
        """Like `fill`, of encoder tokens in the cross groups."""
        for group in self._groups.cross:
            self._put(slots[group, : positions.size], group, rows, positions, has_null_pages)

    def _put(self, out: Ints, group: int, rows: Ints, positions: Ints, has_null_pages: bool) -> None:
        size, place = self._groups.block_sizes[group], self._groups.place
        page, offset = _divided(positions, self._groups.tokens_per_block[group])
        np.multiply(self._tables[group, rows, page], size, out=out, dtype=np.int64)
        if group in self._groups.sharded and place is not None:
            offset = local_offsets(positions, page, size, place)
            # Another rank has the token, and writes it.
            out[offset < 0] = PAD_SLOT_ID
            offset = np.maximum(offset, 0)
        out += offset
        if has_null_pages:
            # These slots lie in block 0, the null block.
            out[out < size] = PAD_SLOT_ID


def _divided(positions: Ints, size: int) -> tuple[Ints, Ints]:
    """The page of each position, and the place in it."""
    # numpy divides as slowly by powers of two as by other numbers, so these are shifted.
    if size & (size - 1):
        return np.divmod(positions, size)
    return positions >> (size.bit_length() - 1), positions & (size - 1)


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
        trees: Mapping[str, DraftTree] | None = None,
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
            trees: see StepBatch; None without.
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
        in_flight = requests.members.names
        # The rows of a profile step are no requests of the builder.
        known = in_flight if len(in_flight) == reqs else None
        host = HostRows(requests.tables[:, :reqs], computed.copy(), scheduled, known)
        places = positions.copy()
        for name, tree in (trees or {}).items():
            row = names.index(name)
            places[starts[row] : starts[row + 1]] = computed[row] + tree.depths
        parts = sharded, stamps, host, places, trees or {}
        return StepBatch(common, first, tables, slots_sent, counts, *own_groups, *parts).sealed()
