"""Refusals of a step that a runtime cannot begin: its arguments, its order, and missing spans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attnplug.core.composite import CompositeBackend
from attnplug.core.errors import BatchError
from attnplug.core.metadata import AttentionMetadata, CommonAttentionMetadata
from attnplug.runtime.arguments import instance, integer
from attnplug.runtime.attention_groups import AttentionGroup
from attnplug.runtime.step_batch import StepBatch


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


def first_with_spans(groups: Iterable[AttentionGroup]) -> str | None:
    """A layer that needs multimodal spans; None without any."""
    return next((g.layer_names[0] for g in groups if any(spec.mm_prefix for spec in g.specs)), None)


def check_spans(field: str, common: CommonAttentionMetadata, layer: str | None) -> None:
    """BatchError if `layer` needs multimodal spans and the step has none."""
    if layer is not None and common.mm_prefix_spans is None:
        remedy = "give int32 [T, 2], zeros for text; the runtime's step_batch_builder() fills them"
        raise BatchError(
            f"{field}.mm_prefix_spans", None, f"is required: layer {layer} has mm_prefix", remedy
        )
