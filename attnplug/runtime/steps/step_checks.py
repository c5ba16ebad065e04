"""Checks that a batch was made for the KV groups, the device and the pool of a plan.

Refusals of a step that a runtime cannot begin: its arguments, its order, and missing spans.

The selections that sparse layers need: whether a step has one, and in debug mode whether its values are allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.arguments import instance, integer
from attnplug.core.composite import CompositeBackend
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import KVCacheConfig, KVCacheSpec
from attnplug.core.metadata import PAD_SLOT_ID, STEP_INPUTS, AttentionMetadata, CommonAttentionMetadata
from attnplug.core.selection import Selection
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.core.step_inputs import StepInput
from attnplug.runtime.batch.kv_groups import first_attended, reach
from attnplug.runtime.batch.step_batch import StepBatch
from attnplug.runtime.plan.grouping import cross_groups
from attnplug.runtime.plan.sharding import tokens_per_block

if TYPE_CHECKING:
    from attnplug.runtime.steps.attention_groups import AttentionGroup

_Ints: TypeAlias = npt.NDArray[Any]
_SMALL = 1 << 12
"""Entries that are looked at all together first, which is faster than by request."""
_REMEDY = "make batches with the runtime's step_batch_builder()"


def check_groups(batch: StepBatch, config: KVCacheConfig) -> None:
    """Refuse a batch of other KV groups. It reads nothing from the device.

    Raises:
        BatchError: another number of groups, other block sizes, or groups of other kinds.
    """
    groups, found = config.kv_cache_groups, batch.block_tables.shape[0]
    if found != len(groups):
        raise BatchError("batch.block_tables", found, f"must be {len(groups)}, one for each KV group")
    cross = cross_groups(config)
    if cross != batch.cross_groups:
        limit = f"must be {sorted(cross)}, the KV groups with a CrossAttentionSpec"
        raise BatchError("batch.cross_groups", sorted(batch.cross_groups), limit)
    sizes = tuple(group.kv_cache_spec.block_size for group in groups)
    if sizes != batch.block_sizes:
        limit = f"must be {sizes}, those of the plan's KV groups"
        raise BatchError("batch.block_sizes", batch.block_sizes, limit, _REMEDY)
    for index, (group, given) in enumerate(zip(groups, batch.kv_cache_specs, strict=False)):
        own = group.kv_cache_spec
        # By identity first, because batches of the runtime's own builder have the plan's objects.
        if given is not own and reach(given) != reach(own):
            limit = f"must be {reach(own)}, because it decides which blocks a request keeps"
            raise BatchError(f"batch.kv_cache_specs[{index}]", reach(given), limit, _REMEDY)


def check_device(
    batch: StepBatch | None, direct: CommonAttentionMetadata | None, device: torch.device
) -> None:
    """BatchError if a tensor of a batch is on another device."""
    tensors = {}
    if batch is not None:
        tensors["batch.block_tables"] = batch.block_tables
        tensors["batch.slot_mappings"] = batch.slot_mappings
    commons = {"batch.common": None if batch is None else batch.common, "direct": direct}
    for name, common in commons.items():
        if common is not None:
            tensors[f"{name}.query_start_loc"] = common.query_start_loc
            tensors[f"{name}.seq_lens"] = common.seq_lens
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise BatchError(name, tensor, "must be a torch.Tensor", _REMEDY)
        if tensor.device != device:
            raise BatchError(
                f"{name}.device", str(tensor.device), f"must be {device}, the runtime's", _REMEDY
            )


def check_pool(batch: StepBatch, config: KVCacheConfig, compare: bool = True, debug: bool = False) -> None:
    """Refuse slots and pages past the pool, and null pages that are attended. On a GPU the host waits for the tables.

    With `compare`, a slot must be where the table has its token. Debug mode also refuses a slot of two tokens, such as of
    requests that share a block which one of them still writes.

    Raises:
        BatchError: a slot or a page that the step reads is not in the pool, a table is too narrow, or a request
            that writes its tokens attends those of a null block.
    """
    common = batch.common
    lengths = _on_host(common.seq_lens_host, common.seq_lens, common.num_reqs)
    starts = common.query_start_loc_cpu.numpy()[: common.num_reqs + 1]
    for index, (group, (table, slots)) in enumerate(
        zip(config.kv_cache_groups, batch.by_group(), strict=True)
    ):
        spec, field = group.kv_cache_spec, f"batch.block_tables[{index}]"
        capacity = config.num_blocks * spec.block_size
        if slots.numel() and int(slots.max()) >= capacity:
            limit = f"of KV group {index} is past the {capacity} slots of {config.num_blocks} blocks"
            raise BatchError("batch.slot_mappings", int(slots.max()), limit)
        if index in batch.cross_groups:
            tokens = _on_host(common.encoder_seq_lens_cpu, common.encoder_seq_lens, common.num_reqs)
            _check_pages(field, table, -(-tokens // spec.block_size), config.num_blocks)
            continue
        size = tokens_per_block(spec, None if batch.sharded is None else batch.sharded.place)
        low = _check_pages(field, table, -(-lengths // size), config.num_blocks)
        if (compare or debug) and (batch.sharded is None or index not in batch.sharded.groups):
            _check_slots(index, table, slots, lengths, starts, spec.block_size, debug)
        if low == 0:
            _check_nulls(field, table, slots, lengths, starts, spec, size)


def _check_slots(
    group: int,
    table: torch.Tensor,
    slots: torch.Tensor,
    lengths: _Ints,
    starts: _Ints,
    size: int,
    debug: bool,
) -> None:
    """BatchError for a slot that is not where the table has the token; in debug mode also for one of two tokens."""
    queries = np.diff(starts)
    rows = np.repeat(np.arange(queries.size), queries)
    given = slots.cpu().numpy()[: rows.size]
    positions = np.arange(rows.size) + np.repeat(lengths.astype(np.int64) - starts[1:], queries)
    written = given != PAD_SLOT_ID
    if not written.any():
        return
    # Padding requests have more queries than tokens, and store none of them.
    pages = np.maximum(positions, 0) // size
    blocks = table.cpu().numpy()[rows, np.minimum(pages, table.shape[1] - 1)].astype(np.int64)
    bad = written & ((positions < 0) | (blocks == 0) | (given != blocks * size + positions % size))
    field = f"batch.slot_mappings[{group}"
    if bad.any():
        token = int(bad.argmax())
        row, position = int(rows[token]), int(positions[token])
        limit = f"is not where the table of request {row} of the batch has its token {position}"
        raise BatchError(f"{field}, {token}]", int(given[token]), limit, _REMEDY)
    if not debug:
        return
    ordered = np.sort(given[written])
    twice = ordered[1:] == ordered[:-1]
    if twice.any():
        slot = int(ordered[1:][twice][0])
        first, second = np.flatnonzero(given == slot)[:2].tolist()
        limit = f"is the slot of token {first} of the batch too: each token is written to its own"
        raise BatchError(f"{field}, {second}]", slot, limit, "give requests blocks of their own to write to")


def _check_pages(field: str, table: torch.Tensor, pages: _Ints, num_blocks: int) -> int:
    """The lowest number of the pages that are read, or one below it; 1 without any."""
    most = int(pages.max(initial=0))
    if most > table.shape[1]:
        raise BatchError(field, table.shape[1], f"pages are too few: a request reads {most}")
    if most == 0:
        return 1
    numbers = table.cpu().numpy()[: pages.size]
    if pages.size * most <= _SMALL:
        low = int(numbers[:, :most].min())
        if low > 0 and int(numbers[:, :most].max()) < num_blocks:
            return low
    # Entries past a request's pages may hold anything.
    low = _extreme(np.minimum, numbers, np.zeros_like(pages), pages)
    if low >= 0 and _extreme(np.maximum, numbers, np.zeros_like(pages), pages) < num_blocks:
        return low
    numbers = numbers[:, :most]
    is_read = np.arange(most) < pages[:, None]
    bad = numbers[is_read & ((numbers < 0) | (numbers >= num_blocks))]
    raise BatchError(field, int(bad[0]), f"must be in 0 .. {num_blocks - 1}, the blocks of the pool")


def _extreme(of: np.ufunc, table: _Ints, begins: _Ints, ends: _Ints) -> int:
    """The least or largest number in columns `begins .. ends` of each row; 1 without any.

    It reads no other entries and makes no mask, because tables may be much wider than most rows.
    """
    rows = np.flatnonzero(begins < ends)
    if not rows.size:
        return 1
    flat = np.ascontiguousarray(table).reshape(-1)
    first = rows * table.shape[1]
    bounds = np.stack([first + begins[rows], first + ends[rows]], axis=1).reshape(-1)
    # The last part ends with the table by itself, and the parts between two rows are left out.
    bounds = bounds[:-1] if bounds[-1] == flat.size else bounds
    return int(of.reduce(of.reduceat(flat, bounds)[::2]))


def _check_nulls(
    field: str,
    table: torch.Tensor,
    slots: torch.Tensor,
    lengths: _Ints,
    starts: _Ints,
    spec: KVCacheSpec,
    size: int,
) -> None:
    queries = np.diff(starts)
    rows = np.flatnonzero(queries > 0)
    # Requests of dummy steps and the padding of graphs write no slot, and read null blocks only.
    rows = rows[slots.cpu().numpy()[starts[rows + 1] - 1] >= 0]
    if not rows.size:
        return
    ends = lengths[rows].astype(np.int64)
    first = first_attended(spec, ends - queries[rows])
    numbers = table.cpu().numpy()
    begins, last = np.zeros((2, numbers.shape[0]), dtype=np.int64)
    begins[rows], last[rows] = first // size, -(-ends // size)
    if _extreme(np.minimum, numbers, begins, last) > 0:
        return
    pages = np.arange(int(last.max()))
    is_attended = (pages >= begins[rows, None]) & (pages < last[rows, None])
    row, page = np.argwhere(is_attended & (numbers[rows, : pages.size] == 0))[0].tolist()
    token = max(page * size, int(first[row]))
    limit = f"is the null block, and request {rows[row]} of the batch attends its token {token}"
    raise BatchError(f"{field}[{rows[row]}, {page}]", 0, limit, "give it a block of the pool")


def _on_host(host: _Ints | None, device: torch.Tensor | None, reqs: int) -> _Ints:
    if host is None:
        host = np.zeros(reqs, dtype=np.int32) if device is None else device.cpu().numpy()
    return host[:reqs]


def check_kinds(
    batch: StepBatch | None, direct: CommonAttentionMetadata | None, is_sharded: bool, has_direct: bool
) -> None:
    """Refuse a step without a batch, or with one for layers that the plan does not have.

    Args:
        batch: for the layers with pages.
        direct: for the layers with direct K and V.
        is_sharded: whether the plan has context parallelism.
        has_direct: whether the plan has layers with direct K and V.

    Raises:
        BatchError: see above, or a batch of another type.
    """
    if batch is None and direct is None:
        raise BatchError("batch", None, "is required: give batch, direct, or both")
    if batch is not None:
        instance("batch", batch, StepBatch, remedy="make it by StepBatchBuilder.step")
        if batch.sharded is not None and not is_sharded:
            limit = "must be None: the plan of this runtime has no context parallelism"
            remedy = "make batches with the runtime's step_batch_builder()"
            raise BatchError("batch.sharded", batch.sharded.place, limit, remedy)
    if direct is not None:
        reqs = instance("direct", direct, CommonAttentionMetadata).num_reqs
        if not has_direct:
            raise BatchError("direct", reqs, "requests, and no layer of the plan has direct K and V")


def check_order(batch: StepBatch, groups: Iterable[AttentionGroup]) -> None:
    """Refuse decodes behind longer queries, which a composite would serve by its prefilling half.

    Raises:
        BatchError: the order is wrong for a composite.
    """
    # Read from the host's copy, so that the check does not wait for the device.
    lengths = batch.common.query_start_loc_cpu.diff()
    for group in groups:
        threshold = group.builder.reorder_batch_threshold
        if threshold is None or not issubclass(group.backend, CompositeBackend):
            continue
        is_short = lengths <= threshold
        if bool((is_short[1:] & ~is_short[:-1]).any()):
            name, decode = group.backend.get_name(), group.backend.decode.get_name()
            limit = f"has queries of up to {threshold} tokens behind longer ones, so {decode} of {name} would miss them"
            remedy = "make batches with the runtime's step_batch_builder(), which orders them"
            raise BatchError("batch", f"{batch.common.num_reqs} requests", limit, remedy)


def check_draft(index: int | None, metadata: Mapping[str, AttentionMetadata] | None, drafts: int) -> None:
    """Refuse draft step `index` of a runtime with `drafts` speculative tokens.

    Raises:
        BatchError: the index is out of range, or the step's metadata is already built.
    """
    if index is None:
        return
    if metadata is not None:
        raise BatchError("draft_index", index, "has no effect on metadata that is already built")
    index = integer("draft_index", index)
    if not 0 <= index < drafts:
        limit = f"must be in 0 .. {drafts - 1}, below config.num_speculative_tokens={drafts}"
        if drafts == 0:
            limit = "needs a runtime that drafts, and config.num_speculative_tokens is 0"
        raise BatchError("draft_index", index, limit, "set it to the number of draft steps")


NeededInputs: TypeAlias = Mapping[StepInput, tuple[str, LayerSpec]]
"""The optional inputs that layers need, and the first layer that needs each."""


def needed_inputs(specs: Mapping[str, LayerSpec]) -> NeededInputs:
    """The optional inputs that layers with these specs need."""
    needed: dict[StepInput, tuple[str, LayerSpec]] = {}
    for each in STEP_INPUTS:
        first = next(((name, spec) for name, spec in specs.items() if each.needed_by(spec)), None)
        if first is not None:
            needed[each] = first
    return needed


def widest_topk(specs: Iterable[LayerSpec]) -> int:
    """The most positions that a query of any layer chooses; 0 without sparse layers."""
    return max((spec.sparse.topk for spec in specs if spec.sparse), default=0)


def check_inputs(field: str, common: CommonAttentionMetadata, needed: NeededInputs) -> None:
    """Refuse a step without an optional input that a layer needs; no value is read.

    Raises:
        BatchError: an input is missing, or a selection is on another device or has too few rows.
    """
    for each, (layer, spec) in needed.items():
        name, given = f"{field}.{each.name}", getattr(common, each.name)
        if given is None and each.why:
            limit = f"is required: layer {layer} {each.why.format(spec=spec)}"
            raise BatchError(name, None, limit, each.remedy)
        if isinstance(given, Selection):
            where = common.query_start_loc.device
            if given.counts.device != where:
                found = str(given.counts.device)
                raise BatchError(f"{name}.device", found, f"must be {where}, like the step")
            given.check_size(common.num_actual_tokens)


def check_values(common: CommonAttentionMetadata, spec: LayerSpec) -> None:
    """Check the values that a sparse layer is about to read; the host waits for the device.

    Raises:
        BatchError: see `Selection.check_values`.
    """
    if spec.sparse is None or common.selection is None:
        return
    lengths = common.seq_lens
    if spec.attn_type is AttentionType.ENCODER_DECODER and common.encoder_seq_lens is not None:
        lengths = common.encoder_seq_lens
    starts = common.query_start_loc_cpu[: common.num_reqs + 1].long()
    lengths = lengths[: common.num_reqs].cpu().long()
    counts = starts.diff()
    requests = torch.arange(counts.shape[0], device="cpu").repeat_interleave(counts)
    ends = lengths[requests]
    if spec.attn_type is not AttentionType.ENCODER_DECODER and common.causal_for(spec):
        ends = torch.arange(requests.shape[0], device="cpu") + (lengths - starts[1:])[requests] + 1
        if spec.mm_prefix and common.mm_prefix_spans is not None:
            ends = torch.maximum(ends, common.mm_prefix_spans[: ends.shape[0], 1].cpu().long())
    common.selection.check_values(spec.sparse, ends)
