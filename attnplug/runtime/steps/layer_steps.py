"""Each layer's part of a step: its metadata, and the rows that a call must have."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from attnplug.core.arguments import instance
from attnplug.core.errors import BatchError
from attnplug.core.interface.impl_and_builder import is_metadata
from attnplug.core.kv_cache_spec import KVCacheConfig
from attnplug.core.metadata import AttentionMetadata, CommonAttentionMetadata
from attnplug.runtime.batch.step_batch import StepBatch, check_same_step
from attnplug.runtime.steps.attention_groups import AttentionGroup, build_attn_metadata, build_step
from attnplug.runtime.steps.prefix_sharing import PrefixSharing
from attnplug.runtime.steps.shared_step import SharedStep


class LayerStep(NamedTuple):
    """One layer's part of the current step.

    Args:
        metadata: from the layer's builder; None for a layer of fast prefill in a step that wants no logits.
        tokens: the number of queries.
        keys: the number of keys that a call must pass; 0 if only the device has it.
        shared: the calls of a step that reads prefixes together or verifies trees; None for a plain one.
    """

    metadata: AttentionMetadata | None
    tokens: int
    keys: int
    shared: SharedStep | None = None


def paged_steps(
    groups: Sequence[AttentionGroup],
    batch: StepBatch,
    config: KVCacheConfig,
    metadata: Mapping[str, AttentionMetadata] | None,
    draft_index: int | None,
    sharing: PrefixSharing,
) -> dict[str, LayerStep]:
    """The parts of the layers with pages.

    Args:
        groups: the attention groups.
        batch: the step.
        config: the KV groups.
        metadata: by layer, if it was already built.
        draft_index: of a draft step; None for others.
        sharing: finds the prefixes that requests share. Draft steps and steps with `metadata` are plain.

    Raises:
        BatchError: see `build_attn_metadata`; or a layer has no metadata, and its output would stay unwritten. A layer
            cannot verify the trees of the step.
    """
    # Builders of fast prefill never see a step without tokens.
    wanted = None if draft_index is not None else batch.common.num_logits_indices
    served = [group for group in groups if not (group.fast_prefill and wanted == 0)]
    if batch.trees:
        sharing.check_trees(batch, metadata is not None or draft_index is not None)
        served = [group for group in served if group.kv_cache_group_id in batch.cross_groups]
    shared: dict[str, SharedStep] = {}
    if metadata is None:
        built: Mapping[str, AttentionMetadata]
        built = own = build_attn_metadata(served, batch, config, draft_index=draft_index)
        # A batch that was changed by hand may have other requests than its builder's tables.
        if draft_index is None and batch.is_as_made:
            shared = sharing.begin(batch, getattr(own, "own_prefix", ()))
    else:
        check_same_step(metadata, batch.stamps)
        built = _built(metadata, served)
    steps: dict[str, LayerStep] = {}
    for group in groups:
        tokens, written = batch.common.num_actual_tokens, batch.num_slots[group.kv_cache_group_id]
        if group.fast_prefill and wanted is not None:
            tokens = wanted
        steps.update(
            {
                name: LayerStep(built.get(name), tokens, written, shared.get(name))
                for name in group.layer_names
            }
        )
    return steps


def direct_steps(
    groups: Iterable[AttentionGroup], direct: CommonAttentionMetadata, draft_index: int | None
) -> dict[str, LayerStep]:
    """The parts of the layers that get K and V with the call."""
    keys = direct.num_actual_tokens if direct.key_start_loc is None else 0
    known = direct.key_start_loc_cpu
    if known is None and direct.key_start_loc is not None and direct.key_start_loc.device.type == "cpu":
        known = direct.key_start_loc
    if known is not None:
        keys = int(known[direct.num_reqs])
    steps: dict[str, LayerStep] = {}
    for group in groups:
        made = build_step(group, direct.for_layers(group.specs), draft_index)
        steps.update(dict.fromkeys(group.layer_names, LayerStep(made, direct.num_actual_tokens, keys)))
    return steps


def _built(
    metadata: Mapping[str, AttentionMetadata], groups: Iterable[AttentionGroup]
) -> Mapping[str, AttentionMetadata]:
    instance("metadata", metadata, Mapping)  # type: ignore[type-abstract]
    for name in itertools.chain.from_iterable(group.layer_names for group in groups):
        made = metadata.get(name)
        if not is_metadata(made):
            limit = "must be the metadata that the layer's builder made"
            raise BatchError(f"metadata[{name!r}]", made, limit, "build it by build_attn_metadata")
    return metadata
