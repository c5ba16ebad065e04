"""The selections that sparse layers need: whether a step has one, and in debug mode whether its values are allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from attnplug.core.errors import BatchError
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.sparse import SparseSpec
from attnplug.core.spec import AttentionType, LayerSpec


def first_sparse(specs: Mapping[str, LayerSpec], *, direct: bool) -> tuple[str, SparseSpec] | None:
    """A sparse layer with direct K and V, or one with pages: its name and its keys; None without any."""
    sparse = ((name, spec.sparse) for name, spec in specs.items() if spec.direct_kv is direct)
    return next(((name, found) for name, found in sparse if found is not None), None)


def widest_topk(specs: Iterable[LayerSpec]) -> int:
    """The most positions that a query of any layer chooses; 0 without sparse layers."""
    return max((spec.sparse.topk for spec in specs if spec.sparse), default=0)


def check_given(field: str, common: CommonAttentionMetadata, layer: tuple[str, SparseSpec] | None) -> None:
    """Refuse a step without a selection for a sparse layer; no value is read.

    Raises:
        BatchError: no selection, one on another device, or one with too few rows.
    """
    if layer is None:
        return
    selection, name = common.selection, f"{field}.selection"
    if selection is None:
        remedy = "use the selection of the runtime's step_batch_builder(), or Selection.allocate"
        raise BatchError(name, None, f"is required: layer {layer[0]} is sparse {layer[1]}", remedy)
    where = common.query_start_loc.device
    if selection.counts.device != where:
        raise BatchError(f"{name}.device", str(selection.counts.device), f"must be {where}, like the step")
    selection.check_size(common.num_actual_tokens)


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
