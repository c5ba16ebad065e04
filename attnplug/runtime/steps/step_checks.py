"""Whether the parts of a step fit each other and the plan; the host never waits for the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.arguments import instance, integer
from attnplug.core.composite import CompositeBackend
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import KVCacheConfig
from attnplug.core.metadata import OPTIONAL_ROWS, STEP_INPUTS, AttentionMetadata, CommonAttentionMetadata
from attnplug.core.selection import Selection
from attnplug.core.spec import LayerSpec
from attnplug.core.step_inputs import StepInput
from attnplug.runtime.batch.kv_groups import reach
from attnplug.runtime.batch.step_batch import StepBatch
from attnplug.runtime.plan.grouping import cross_groups

if TYPE_CHECKING:
    from attnplug.runtime.steps.attention_groups import AttentionGroup

_Ints: TypeAlias = npt.NDArray[Any]
COMPARED = {
    each.name: each.host
    for each in STEP_INPUTS
    if each.name in OPTIONAL_ROWS and each.host is not None and each.width is not None
}
"""The optional inputs with rows of requests or tokens, and their copies on the host."""
_MAKE = "make batches with the runtime's step_batch_builder()"
_REMEDY = "use the batch as step() made it, or change all fields that say the same"


def check_arguments(
    batch: StepBatch | None,
    direct: CommonAttentionMetadata | None,
    metadata: Mapping[str, AttentionMetadata] | None,
    draft_index: int | None,
    is_sharded: bool,
    has_direct: bool,
    drafts: int,
    device: torch.device,
) -> None:
    """Refuse a step without a batch, for layers that the plan does not have, or on another device than the runtime's.

    Raises:
        BatchError: see above; a batch of another type; one of `drafts` draft steps that is out of range or already built.
    """
    if batch is None and direct is None:
        raise BatchError("batch", None, "is required: give batch, direct, or both")
    tensors: dict[str, Any] = {}
    if batch is not None:
        instance("batch", batch, StepBatch, remedy="make it by StepBatchBuilder.step")
        if batch.sharded is not None and not is_sharded:
            limit = "must be None: the plan of this runtime has no context parallelism"
            raise BatchError("batch.sharded", batch.sharded.place, limit, _MAKE)
        tensors = {
            "batch.block_tables": batch.block_tables,
            "batch.slot_mappings": batch.slot_mappings,
            "batch.common.query_start_loc": batch.common.query_start_loc,
            "batch.common.seq_lens": batch.common.seq_lens,
        }
    if direct is not None:
        reqs = instance("direct", direct, CommonAttentionMetadata).num_reqs
        if not has_direct:
            raise BatchError("direct", reqs, "requests, and no layer of the plan has direct K and V")
        tensors |= {"direct.query_start_loc": direct.query_start_loc, "direct.seq_lens": direct.seq_lens}
    _check_draft(draft_index, metadata, drafts)
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise BatchError(name, tensor, "must be a torch.Tensor", _MAKE)
        if tensor.device != device:
            limit = f"must be {device}, the runtime's"
            raise BatchError(f"{name}.device", str(tensor.device), limit, _MAKE)


def _check_draft(index: int | None, metadata: Mapping[str, AttentionMetadata] | None, drafts: int) -> None:
    if index is None:
        return
    if metadata is not None:
        raise BatchError("draft_index", index, "has no effect on metadata that is already built")
    if not 0 <= integer("draft_index", index) < drafts:
        limit = f"must be in 0 .. {drafts - 1}, below config.num_speculative_tokens={drafts}"
        if drafts == 0:
            limit = "needs a runtime that drafts, and config.num_speculative_tokens is 0"
        raise BatchError("draft_index", index, limit, "set it to the number of draft steps")


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
        raise BatchError("batch.block_sizes", batch.block_sizes, limit, _MAKE)
    for index, (group, given) in enumerate(zip(groups, batch.kv_cache_specs, strict=False)):
        own = group.kv_cache_spec
        # By identity first, because batches of the runtime's own builder have the plan's objects.
        if given is not own and reach(given) != reach(own):
            limit = f"must be {reach(own)}, because it decides which blocks a request keeps"
            raise BatchError(f"batch.kv_cache_specs[{index}]", reach(given), limit, _MAKE)


def check_batch(batch: StepBatch) -> None:
    """`check_step` of a batch; and refuse one whose tables and slots are not those of its requests and tokens."""
    check_step("batch.common", batch.common, batch.common_group not in batch.cross_groups)
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


def check_step(field: str, common: CommonAttentionMetadata, has_slots: bool = True) -> None:
    """Refuse a step whose fields contradict each other.

    On a CPU the values of device tensors are compared too. On a GPU the host would wait for them, so only their
    sizes and the values on the host are: see `step_values` for the rest.

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
        if given is None or each.name not in COMPARED or each.width is None:
            continue
        rows = each.count(reqs, tokens)
        _size(
            field, each.name, given, 1 + len(each.width), reqs if each.per == "request" else None, torch.int32
        )
        if given.shape[0] < rows:
            limit = f"must have a row for each of num_actual_tokens={tokens}"
            raise _refusal(field, each.name, tuple(given.shape), limit)
        if (host := getattr(common, COMPARED[each.name])) is not None:
            _same(field, each.name, given[:rows], np.asarray(host)[:rows], True)
    if common.key_start_loc is None and common.key_start_loc_cpu is not None:
        raise _refusal(field, "key_start_loc", None, "is required beside key_start_loc_cpu")
    if common.key_start_loc is not None:
        _keys(field, common)
    _wanted(field, common)


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
            found = f"{batch.common.num_reqs} requests"
            raise BatchError("batch", found, limit, f"{_MAKE}, which orders them")


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


def refuse_output_scales(layer_name: str, scales: Mapping[str, object], merging: str) -> None:
    """BatchError for scales of an output that is merged of parts; `merging` says by whom, such as "ranks merge"."""
    limit = f"of layer {layer_name} must be None: {merging} outputs that are not quantised"
    raise BatchError(next(iter(scales)), "given", limit, "quantise the output after attention")
