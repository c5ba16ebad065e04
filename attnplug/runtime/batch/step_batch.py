"""One step's batch over all KV groups.

Numbers that say whether a batch is still that of its builder's latest step.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import KVCacheSpec
from attnplug.core.metadata import AttentionMetadata, CommonAttentionMetadata
from attnplug.ops.buffers import times_written
from attnplug.runtime.batch.draft_trees import DraftTree
from attnplug.runtime.batch.engine_values import Ints
from attnplug.runtime.batch.placeholders import PlaceholderMap
from attnplug.runtime.batch.sharded_step import ShardedStep


@dataclasses.dataclass(slots=True, eq=False)
class StepSerial:
    """Counts the steps of one owner, and the changes after which batches made before are wrong.

    A StepBatchBuilder has one for its steps and the order of its requests, and graph buffers have one for what they
    hold.

    Args:
        now: the latest number.
        last: the call that made it.
    """

    now: int = 0
    last: str = ""

    def advance(self, call: str) -> Stamp:
        """The next number: batches with older ones are out of date. `call` is named in their refusal."""
        self.last = call
        self.now += 1
        return self, self.now


Stamp: TypeAlias = tuple[StepSerial, int]
"""A serial, and its number when a batch was made."""


def check_current(field: str, stamps: tuple[Stamp, ...]) -> None:
    """BatchError if one of the owners has a later number. Batches made by hand have no stamps."""
    for serial, number in stamps:
        if serial.now != number:
            limit = f"is out of date: {serial.last} was called after it was made"
            remedy = "make a batch by step() once requests are in order, and run it before the next change"
            raise BatchError(f"{field}.step", number, limit, remedy)


class StepMetadata(dict[str, AttentionMetadata]):
    """The metadata of a step by layer, the stamps of its batch, and the layers whose builder attends a prefix once."""

    __slots__ = ("own_prefix", "stamps")

    def __init__(self, metadata: Mapping[str, AttentionMetadata], stamps: tuple[Stamp, ...]) -> None:
        super().__init__(metadata)
        self.stamps = stamps
        self.own_prefix: set[str] = set()


def check_same_step(metadata: Mapping[str, AttentionMetadata], stamps: tuple[Stamp, ...]) -> None:
    """BatchError if `metadata` was built for another step than that of a batch with these stamps."""
    built = getattr(metadata, "stamps", ())
    # That of a captured graph has none: its tensors are the graph's buffers, which each step fills.
    if built and stamps and built != stamps:
        limit = f"is not that of the batch, {stamps[0][1]}"
        raise BatchError("metadata.step", built[0][1], limit, "build it for this batch")


class _Made(NamedTuple):
    """The fields of a batch when it was made, and how often each tensor had been written to."""

    fields: list[Any]
    versions: list[int]


class HostRows(NamedTuple):
    """The requests of a step on the host, of which the tables are views of the builder's own.

    Args:
        tables: int32 `[G, R, max_blocks]`.
        computed: int64 `[R]`, computed tokens.
        scheduled: int64 `[R]`, new tokens.
        names: the builder's list of its requests, another one after each change of them or of their order; None for
            rows that are no builder's.
    """

    tables: npt.NDArray[np.int32]
    computed: Ints
    scheduled: Ints
    names: list[str] | None = None


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
        host: the requests on the host, from which a runtime finds shared prefixes; None for a batch made by hand.
        positions: int64 `[T]` on the host, the position of each token in its sequence: computed tokens, and for a draft
            its depth in the tree. None for a batch made by hand.
        trees: by request, the draft trees that the step verifies.
        stamps: the step of the builder, and the contents of a graph's buffers, that it belongs to; a runtime refuses
            it once they have changed. Empty for a batch made by hand.
        made: set by `sealed`.
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
    stamps: tuple[Stamp, ...] = ()
    host: HostRows | None = None
    positions: Ints | None = None
    trees: Mapping[str, DraftTree] = dataclasses.field(default_factory=dict)
    made: _Made | None = None

    def sealed(self) -> Self:
        """The batch itself, as its builder made it: while nothing changes, a runtime need not compare its fields."""
        self.made = _Made(*(_parts(self)))
        return self

    @property
    def is_as_made(self) -> bool:
        """Whether each field is still the object that the builder put there, and no tensor was written to since."""
        made = self.made
        if made is None:
            return False
        fields, versions = _parts(self)
        same = len(fields) == len(made.fields) and all(map(operator.is_, fields, made.fields))
        return same and versions == made.versions

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

    def by_group(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`of_group` of all KV groups, for less than as many calls of it."""
        tables, slots = self.block_tables.unbind(), self.slot_mappings.unbind()
        most = self.slot_mappings.shape[1]
        return [
            (table, row if count == most else row[:count])
            for table, row, count in zip(tables, slots, self.num_slots, strict=True)
        ]


_OF_COMMON = operator.attrgetter(
    *(field.name for field in dataclasses.fields(CommonAttentionMetadata) if not field.name.startswith("_"))
)
_OF_BATCH = operator.attrgetter(
    *("common_group", "block_tables", "slot_mappings", "num_slots", "cross_groups", "req_ids", "block_sizes"),
    *("kv_cache_specs", "sharded", "host", "trees"),
)


def _parts(batch: StepBatch) -> tuple[list[Any], list[int]]:
    common = batch.common
    # Torch counts the writes to a tensor and its views, so no value is read.
    tensors = batch.block_tables, batch.slot_mappings, common.query_start_loc_cpu, common.query_start_loc
    versions = [times_written(tensor) for tensor in (*tensors, common.seq_lens)]
    return [*_OF_COMMON(common), *_OF_BATCH(batch)], versions
