"""Fields of a step that say the same thing agree, or the step is refused; the host never waits for the device.

Compares what a GPU reads of a step with the host's copy, and tells of a difference without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.errors import BatchError
from attnplug.core.metadata import OPTIONAL_ROWS, STEP_INPUTS, CommonAttentionMetadata
from attnplug.runtime.batch.step_batch import StepBatch

_Ints: TypeAlias = npt.NDArray[Any]
_COMPARED = {
    each.name: each.host
    for each in STEP_INPUTS
    if each.name in OPTIONAL_ROWS and each.host is not None and each.width is not None
}
"""The optional inputs with rows of requests or tokens, and their copies on the host."""
_REMEDY = "use the batch as step() made it, or change all fields that say the same"


def check_step(field: str, common: CommonAttentionMetadata, has_slots: bool = True) -> None:
    """Refuse a step whose fields contradict each other.

    On a CPU the values of device tensors are compared too. On a GPU the host would wait for them, so only their
    sizes and the values on the host are: see `DeviceComparison` for the rest.

    Args:
        field: the name of the step in errors.
        common: the step.
        has_slots: whether its slots are those of its tokens; those of cross attention are of encoder tokens.

    Raises:
        BatchError: a count, size, start location, length or index does not fit the others.
    """
    reqs, tokens = common.num_reqs, common.num_actual_tokens
    for name, value in (("num_reqs", reqs), ("num_actual_tokens", tokens)):
        if type(value) is not int or value < 0:
            raise BatchError(f"{field}.{name}", value, "must be an int of at least 0")
    starts = _starts(field, "query_start_loc", common.query_start_loc, common.query_start_loc_cpu, reqs)
    lens = starts[1:] - starts[:-1]
    last, longest = int(starts[-1]), int(lens.max(initial=0))
    if last > tokens:
        raise _refusal(
            field, "query_start_loc_cpu", last, f"must end at or before num_actual_tokens={tokens}"
        )
    # A step may have rows of no request after the last, such as padding; it then knows its longest query.
    if longest > common.max_query_len or (last < tokens and longest != common.max_query_len):
        limit = f"must be {longest}, the longest query of query_start_loc_cpu"
        raise _refusal(field, "max_query_len", common.max_query_len, limit)
    _size(field, "seq_lens", common.seq_lens, 1, reqs, torch.int32)
    _lengths(field, common)
    _size(field, "block_table_tensor", common.block_table_tensor, 2, reqs, torch.int32)
    _size(field, "slot_mapping", common.slot_mapping, 1, None, torch.int64)
    if has_slots and common.slot_mapping.shape[0] < tokens:
        limit = f"must have a slot for each of num_actual_tokens={tokens}"
        raise _refusal(field, "slot_mapping", tuple(common.slot_mapping.shape), limit)
    for each in STEP_INPUTS:
        given = getattr(common, each.name)
        if given is None or each.name not in _COMPARED or each.width is None:
            continue
        rows = each.count(reqs, tokens)
        _size(
            field, each.name, given, 1 + len(each.width), reqs if each.per == "request" else None, torch.int32
        )
        if given.shape[0] < rows:
            limit = f"must have a row for each of num_actual_tokens={tokens}"
            raise _refusal(field, each.name, tuple(given.shape), limit)
        if (host := getattr(common, _COMPARED[each.name])) is not None:
            _same(field, each.name, given[:rows], np.asarray(host)[:rows], True)
    if common.key_start_loc is None and common.key_start_loc_cpu is not None:
        raise _refusal(field, "key_start_loc", None, "is required beside key_start_loc_cpu")
    if common.key_start_loc is not None:
        _keys(field, common)
    _wanted(field, common)


def check_groups_of(batch: StepBatch) -> None:
    """Refuse a batch whose tables and slots are not those of its requests and tokens.

    Raises:
        BatchError: see above.
    """
    common, tables, slots = batch.common, batch.block_tables, batch.slot_mappings
    _size("batch", "block_tables", tables, 3, None, torch.int32)
    _size("batch", "slot_mappings", slots, 2, None, torch.int64)
    groups = tables.shape[0]
    if tables.shape[1] != common.num_reqs:
        limit = f"must be [{groups}, {common.num_reqs}, max_blocks], a row for each request"
        raise _refusal("batch", "block_tables", tuple(tables.shape), limit)
    if len(batch.num_slots) != groups or slots.shape[0] != groups:
        found = slots.shape[0] if len(batch.num_slots) == groups else len(batch.num_slots)
        raise _refusal("batch", "slot_mappings", found, f"must be {groups} KV groups, as block_tables has")
    for group, count in enumerate(batch.num_slots):
        # Cross groups write the encoder's tokens.
        if group not in batch.cross_groups and count != common.num_actual_tokens:
            limit = f"must be {common.num_actual_tokens} in KV group {group}, a slot for each token"
            raise _refusal("batch", "num_slots", count, limit)
        if count > slots.shape[1]:
            raise _refusal(
                "batch", "num_slots", count, f"is past the {slots.shape[1]} slots of slot_mappings"
            )
    at = batch.common_group
    if not 0 <= at < groups:
        raise _refusal("batch", "common_group", at, f"must be one of {groups} KV groups")
    # Fields of a copied batch have memory of their own, with equal numbers.
    if not _is_view(common.block_table_tensor, tables[at]):
        limit = f"must be the table of KV group {at} in batch.block_tables"
        raise _refusal("batch.common", "block_table_tensor", tuple(common.block_table_tensor.shape), limit)
    tokens = common.num_actual_tokens
    if not _is_view(common.slot_mapping[:tokens], slots[at][:tokens]):
        limit = f"must be the slots of KV group {at} in batch.slot_mappings"
        raise _refusal("batch.common", "slot_mapping", tuple(common.slot_mapping.shape), limit)


def _is_view(own: torch.Tensor, whole: torch.Tensor) -> bool:
    if not whole.numel() or own.data_ptr() == whole.data_ptr():
        return True
    return own.device.type == "cpu" and own.shape == whole.shape and torch.equal(own, whole)


def _starts(field: str, name: str, device: torch.Tensor, host: torch.Tensor | None, reqs: int) -> _Ints:
    """The start locations on the host, `[R + 1]`."""
    _size(field, name, device, 1, reqs + 1, torch.int32)
    if host is None:
        raise _refusal(field, f"{name}_cpu", None, "is required: the host reads it")
    if not isinstance(host, torch.Tensor) or host.device.type != "cpu":
        raise _refusal(field, f"{name}_cpu", host, "must be a tensor on the CPU")
    _size(field, f"{name}_cpu", host, 1, reqs + 1, None)
    starts: _Ints = host.numpy()
    if starts[0] != 0 or (reqs and bool((starts[1:] < starts[:-1]).any())):
        raise _refusal(field, f"{name}_cpu", starts.tolist(), "must start at 0 and not decrease")
    _same(field, name, device, starts, True)
    return starts


def _lengths(field: str, common: CommonAttentionMetadata) -> None:
    host, reqs = common.seq_lens_host, common.num_reqs
    if host is None:
        return
    if not isinstance(host, np.ndarray) or host.shape != (reqs,):
        found = getattr(host, "shape", host)
        raise _refusal(field, "seq_lens_host", found, f"must be a numpy array of {reqs} lengths")
    if reqs and int(host.min()) < 0:
        raise _refusal(field, "seq_lens_host", int(host.min()), "must not be negative")
    longest = int(host.max(initial=0))
    if longest > common.max_seq_len:
        limit = f"must be at least {longest}, the longest of seq_lens_host"
        raise _refusal(field, "max_seq_len", common.max_seq_len, limit)
    _same(field, "seq_lens", common.seq_lens, host, common.seq_lens_host_exact)


def _keys(field: str, common: CommonAttentionMetadata) -> None:
    device, host = common.key_start_loc, common.key_start_loc_cpu
    if device is None:
        return
    if host is None:
        _size(field, "key_start_loc", device, 1, common.num_reqs + 1, torch.int32)
        return
    keys = np.diff(_starts(field, "key_start_loc", device, host, common.num_reqs))
    lengths = common.seq_lens_host
    if lengths is not None and bool((keys > lengths).any()):
        worst = int((keys > lengths).argmax())
        limit = f"gives request {worst} more keys than its {int(lengths[worst])} tokens"
        raise _refusal(field, "key_start_loc_cpu", int(keys[worst]), limit)


def _wanted(field: str, common: CommonAttentionMetadata) -> None:
    count, indices = common.num_logits_indices, common.logits_indices_padded
    if count is None:
        return
    if indices is None or indices.ndim != 1 or not 0 <= count <= indices.shape[0]:
        size = None if indices is None else tuple(indices.shape)
        limit = f"must be in 0 .. the size of logits_indices_padded, {size}"
        raise _refusal(field, "num_logits_indices", count, limit)
    host = common.logits_indices_cpu
    if host is None:
        return
    rows = host.numpy()[:count]
    if rows.shape != (count,):
        raise _refusal(field, "logits_indices_cpu", tuple(host.shape), f"must have {count} rows")
    if count and not 0 <= int(rows.min()) <= int(rows.max()) < common.num_actual_tokens:
        limit = f"must be in 0 .. {common.num_actual_tokens - 1}, rows of the step"
        raise _refusal(field, "logits_indices_cpu", [int(rows.min()), int(rows.max())], limit)
    _same(field, "logits_indices_padded", indices[:count], rows, True)


def _size(
    field: str, name: str, tensor: object, ndim: int, rows: int | None, dtype: torch.dtype | None
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise _refusal(field, name, tensor, "must be a torch.Tensor")
    if tensor.ndim != ndim or (rows is not None and tensor.shape[0] != rows):
        first = "rows" if rows is None else str(rows)
        shape = ", ".join([first, *["max_blocks"] * (ndim - 1)])
        raise _refusal(field, name, tuple(tensor.shape), f"must be of shape [{shape}]")
    if dtype is not None and tensor.dtype is not dtype:
        raise _refusal(field, f"{name}.dtype", str(tensor.dtype), f"must be {dtype}")


def _same(field: str, name: str, device: torch.Tensor, host: _Ints, exact: bool) -> None:
    """Compare a tensor on the CPU with its host copy, or with an upper bound of it."""
    if device.device.type != "cpu":
        return
    values = device.numpy()
    if values.ctypes.data == host.ctypes.data and values.shape == host.shape:
        return
    bad = values != host if exact else values > host
    if bad.any():
        worst = np.unravel_index(int(bad.argmax()), bad.shape)
        relation = "must equal" if exact else "must not pass"
        limit = f"{relation} {int(host[worst])}, which the host has"
        raise _refusal(field, f"{name}[{', '.join(map(str, worst))}]", int(values[worst]), limit)


def _refusal(field: str, name: str, value: object, limit: str) -> BatchError:
    return BatchError(f"{field}.{name}", value, limit, _REMEDY)


class DeviceComparison:
    """The comparisons of the steps so far, which the device may still be computing."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, list[str], torch.Tensor, torch.cuda.Event]] = []

    def begin(self, field: str, common: CommonAttentionMetadata) -> None:
        """Compare a step on its GPU; nothing happens on a CPU."""
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
    for name, copied in (pairs | {"key_start_loc": "key_start_loc_cpu"} | _COMPARED).items():
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
