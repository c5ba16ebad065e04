"""Checks of values that the device has: on a GPU the host waits for them, but for a comparison that nobody waits for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import KVCacheConfig, KVCacheSpec
from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.runtime.batch.kv_groups import first_attended
from attnplug.runtime.batch.step_batch import StepBatch
from attnplug.runtime.plan.sharding import tokens_per_block
from attnplug.runtime.steps.step_checks import COMPARED

_Ints: TypeAlias = npt.NDArray[Any]
# So many entries are read all together first, which is faster than by request.
_SMALL = 1 << 12
_REMEDY = "make batches with the runtime's step_batch_builder()"


def check_pool(batch: StepBatch, config: KVCacheConfig, compare: bool = True, debug: bool = False) -> None:
    """Refuse slots and pages past the pool, and null pages that are attended. On a GPU the host waits for the tables.

    With `compare`, a slot must be where the table has its token. Debug mode also refuses a slot of two tokens, such as of
    requests that share a block which one of them still writes.

    Raises:
        BatchError: a slot or a page that the step reads is not in the pool, or a table is too narrow. A request that
            writes its tokens attends those of a null block.
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
    """The least or largest number in columns `begins .. ends` of each row; 1 without any."""
    # It reads no other entries and makes no mask, because tables may be much wider than most rows.
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


class DeviceComparison:
    """The comparisons of the steps so far, which the device may still be computing."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, list[str], torch.Tensor, torch.cuda.Event]] = []

    def begin(self, field: str, common: CommonAttentionMetadata) -> None:
        """Compare a step on its GPU; nothing happens on a CPU."""
        # In a capture the comparison would become a part of the graph.
        if common.query_start_loc.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        found = dict(_differences(common))
        if not found:
            return
        flags = torch.empty(len(found), dtype=torch.bool, device="cpu", pin_memory=True)
        flags.copy_(torch.stack(list(found.values())), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append((field, list(found), flags, event))

    def check(self) -> None:
        """Raise for a comparison that is done and found a difference.

        Raises:
            BatchError: a tensor on the device differs from its host copy.
        """
        while self._pending and self._pending[0][-1].query():  # type: ignore[no-untyped-call]
            field, names, flags, _ = self._pending.pop(0)
            for name, differs in zip(names, flags.tolist(), strict=True):
                if differs:
                    limit = "differs from its copy on the host, so the outputs of that step are wrong"
                    remedy = "give both sides of a batch the same values, or use StepBatchBuilder"
                    raise BatchError(f"{field}.{name}", "on the device", limit, remedy)


def _differences(common: CommonAttentionMetadata) -> Iterator[tuple[str, torch.Tensor]]:
    pairs = {"query_start_loc": "query_start_loc_cpu", "seq_lens": "seq_lens_host"}
    for name, copied in (pairs | {"key_start_loc": "key_start_loc_cpu"} | COMPARED).items():
        device, host = getattr(common, name), getattr(common, copied)
        if device is None or host is None:
            continue
        values: Any = host if isinstance(host, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(host))
        # The rows past the step's tokens are not read, and either side may have more of them.
        rows = min(device.shape[0], values.shape[0])
        # The host waits for copies from memory that is not pinned.
        sent = values[:rows].pin_memory().to(device.device, non_blocking=True)
        is_exact = name != "seq_lens" or common.seq_lens_host_exact
        yield name, (device[:rows] != sent).any() if is_exact else (device[:rows] > sent).any()
