"""Groups of layers that share a builder, and the metadata of each step for all layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol, cast, runtime_checkable

import torch

from attnplug.core.arguments import checked, mapping_of, one_of, sequence_of, torch_device
from attnplug.core.backend import AttentionBackend
from attnplug.core.batch.kv_sharing import create_fast_prefill_custom_backend, of_wanted_tokens
from attnplug.core.config import BuilderConfig
from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.interface.answers import answer
from attnplug.core.interface.impl_and_builder import checked_metadata, make_builder
from attnplug.core.kv_cache_spec import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    kv_cache_spec_for,
)
from attnplug.core.metadata import (
    STEP_INPUTS,
    WITHOUT_LOGITS,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    own_build_key,
)
from attnplug.core.spec import LayerSpec, Phase
from attnplug.core.validation import reads_blocks
from attnplug.registry.selection.decision import Decision
from attnplug.runtime.batch.cascade import cascade_prefix_len
from attnplug.runtime.batch.step_batch import StepBatch, StepMetadata, check_current
from attnplug.runtime.steps.step_checks import check_groups


def _names(field: str, value: object) -> object:
    is_names = isinstance(value, (Sequence, Set, Mapping)) and not isinstance(value, str)
    if not is_names or not all(isinstance(name, str) for name in cast("Collection[Any]", value)):
        raise LayoutError(field, value, "must be a collection of layer names")
    return value


@runtime_checkable
class WorkspaceUser(Protocol):
    """A builder with a large scratch buffer, which all such builders of a device share."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes that the builder needs."""
        ...

    def get_workspace_buffer(self) -> torch.Tensor:
        """The builder's buffer, allocated on first use."""
        ...

    def set_workspace_buffer(self, buffer: torch.Tensor) -> None:
        """Use the buffer of another builder, which is large enough."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttentionGroup:
    """The layers of one KV group that one builder serves.

    Args:
        backend: the backend of the layers.
        layer_names: names of the layers.
        kv_cache_spec: the contents of their pages.
        kv_cache_group_id: the KV group whose block table they read.
        builder: makes their metadata.
        specs: the distinct specs of the layers.
        phase: the phase that the backend serves; None for both.
        fast_prefill: whether the layers compute only the tokens whose logits are wanted.
    """

    backend: type[AttentionBackend]
    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec
    kv_cache_group_id: int
    builder: AttentionMetadataBuilder[Any]
    specs: frozenset[LayerSpec]
    phase: Phase | None = None
    fast_prefill: bool = False


@checked(
    groups=sequence_of(one_of(KVCacheGroupSpec, error=LayoutError), "KVCacheGroupSpec"),
    decisions=mapping_of(Decision),
    config=one_of(BuilderConfig, error=LayoutError),
    device=torch_device,
    fast_prefill=_names,
)
def init_attn_backend(
    groups: Sequence[KVCacheGroupSpec],
    decisions: Mapping[str, Decision],
    config: BuilderConfig,
    device: torch.device | str,
    fast_prefill: Collection[str] = (),
) -> list[AttentionGroup]:
    """One builder for the layers of each KV group with the same backend, number of heads and causality.

    Make the impls first, because builders read them from `config.layers`. Layers with direct K and V belong to
    no KV group and get no builder here. Builders with a workspace share one.

    Args:
        groups: the KV groups.
        decisions: the decision for each layer.
        config: the engine's settings for builders.
        device: of the metadata.
        fast_prefill: layers that compute only the tokens whose logits are wanted; they get builders of their own,
            from `create_fast_prefill_custom_backend`.

    Raises:
        LayoutError: a layer is in no group or in two, has no decision, or has pages of a size that its backend
            cannot read.
        NoBackendError: no backend serves a layer.
    """
    _check_layers(groups, decisions)
    made: list[AttentionGroup] = []
    where = torch.device(device)
    for group_id, group in enumerate(groups):
        cache = group.kv_cache_spec
        names_by_key: dict[Any, list[str]] = {}
        for name in group.layer_names:
            decision = decisions[name]
            backend = decision.get_backend_cls()
            if not reads_blocks(backend, cache.block_size, decision.spec, decision.device):
                sizes = answer(backend, "get_supported_kernel_block_sizes", decision.spec, decision.device)
                readable = ", ".join(map(str, sizes))
                limit = f"of layer {name} cannot be read by {backend.get_name()}, which reads {readable}"
                raise LayoutError("block_size", cache.block_size, limit)
            is_fast = name in fast_prefill
            key = (is_fast, backend, decision.phase, decision.spec.num_heads, decision.spec.causal)
            names_by_key.setdefault(key, []).append(name)
        for (is_fast, backend, phase, *_), names in names_by_key.items():
            used = _fast_prefill_backend(backend) if is_fast else backend
            builder = make_builder(used, cache, names, config, where)
            specs = frozenset(decisions[name].spec for name in names)
            made.append(AttentionGroup(used, tuple(names), cache, group_id, builder, specs, phase, is_fast))
    share_workspace(group.builder for group in made)
    return made


def init_direct_groups(
    decisions: Mapping[str, Decision], config: BuilderConfig, device: torch.device
) -> list[AttentionGroup]:
    """One builder for the layers with direct K and V of each backend and spec; they belong to KV group -1."""
    names_by_key: dict[Any, list[str]] = {}
    for name, decision in decisions.items():
        names_by_key.setdefault((decision.get_backend_cls(), decision.spec), []).append(name)
    made = []
    for (backend, spec), names in names_by_key.items():
        # The layers have no pages, but builders read the heads of a layer from a page spec.
        cache = cast(KVCacheSpec, kv_cache_spec_for(spec.replace(direct_kv=False), spec.block_size or 1))
        builder = make_builder(backend, cache, names, config, device)
        made.append(AttentionGroup(backend, tuple(names), cache, -1, builder, frozenset({spec})))
    return made


@functools.cache
def _fast_prefill_backend(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    # Cached, because only builders of one class share metadata by `update_block_table`.
    return create_fast_prefill_custom_backend("FastPrefill", backend)


def share_workspace(builders: Iterable[object]) -> None:
    """Allocate the largest workspace that a builder needs, and give it to all of them."""
    users = [each for each in builders if isinstance(each, WorkspaceUser) and each.workspace_bytes]
    if not users:
        return
    # Allocated now, so that memory that is missing is missed before the first request.
    largest = max(users, key=lambda user: user.workspace_bytes)
    buffer = largest.get_workspace_buffer()
    for user in users:
        if user is not largest:
            user.set_workspace_buffer(buffer)


def build_attn_metadata(
    builders: Sequence[AttentionGroup],
    batch: StepBatch,
    kv_cache_config: KVCacheConfig,
    *,
    for_capture: bool = False,
    draft_index: int | None = None,
) -> dict[str, AttentionMetadata]:
    """Each layer's metadata of one step, built once per attention group.

    Groups of one backend with the same specs and kind of pages, or with the same `build_key`, differ only in block
    table and slots. The second such group gets a copy by `update_block_table`, if the builder supports it. If requests
    share leading blocks, the builder decides whether it attends them once.

    Args:
        builders: the attention groups.
        batch: the step.
        kv_cache_config: the KV groups.
        for_capture: whether a CUDA graph is captured with it. A capture updates the same groups as a step, because
            the step before a replay must fill the tensors that the captured layers read.
        draft_index: in speculative decoding, the number of the draft step, from 0, which builders build by
            `build_for_drafting`; None for other steps.

    Raises:
        BatchError: the batch is out of date, or has another number of KV groups, or other cross groups; a draft step is
            captured. A group of decoder tokens is to attend a draft tree, which only a runtime's forward does.
        BackendFaultError: a builder gave no metadata.
    """
    check_groups(batch, kv_cache_config)
    _refuse_trees(builders, batch)
    if for_capture and draft_index is not None:
        remedy = "capture without it: the graph serves draft steps too"
        raise BatchError("draft_index", draft_index, "is not for captures", remedy)
    if draft_index is not None:
        # Builders may draft without `build`, so a draft step runs all rows of layers of fast prefill.
        batch = dataclasses.replace(batch, common=batch.common.changed(**WITHOUT_LOGITS))
    pages = batch.by_group()
    commons: dict[tuple[int, bool | None], CommonAttentionMetadata] = {}
    built: dict[Any, AttentionMetadata] = {}
    check_current("batch", batch.stamps)
    metadata = StepMetadata({}, batch.stamps)
    for group in builders:
        at = group.kv_cache_group_id
        causal = _causal(group, batch)
        twin = _twin(group, batch), causal
        where = at, causal
        prefix = 0
        if batch.shared_prefix_lens and not for_capture and draft_index is None:
            is_part = group.fast_prefill and batch.common.num_logits_indices is not None
            step = of_wanted_tokens(batch.common) if is_part else batch.common
            prefix = cascade_prefix_len(group.builder, group.specs, batch.shared_prefix_lens[at], step)
        # A prefix is in blocks of its own group, so its metadata is never a copy and never copied.
        if twin in built and not prefix and group.builder.supports_update_block_table:
            parts = pages[at]
            if _is_sharded(batch, at):
                if where not in commons:
                    commons[where] = _for_group(batch, at, pages[at], group.kv_cache_spec, causal)
                parts = commons[where].block_table_tensor, commons[where].slot_mapping
            made: AttentionMetadata = group.builder.update_block_table(built[twin], *parts)
            made = checked_metadata(group.backend, "update_block_table", made)
        else:
            if where not in commons:
                commons[where] = _for_group(batch, at, pages[at], group.kv_cache_spec, causal)
            if for_capture:
                made = group.builder.build_for_cudagraph_capture(commons[where])
                made = checked_metadata(group.backend, "build_for_cudagraph_capture", made)
            else:
                made = build_step(group, commons[where], draft_index, prefix)
            if not prefix:
                built[twin] = made
        if prefix:
            metadata.own_prefix.update(group.layer_names)
        metadata.update(dict.fromkeys(group.layer_names, made))
    return metadata


def _refuse_trees(builders: Sequence[AttentionGroup], batch: StepBatch) -> None:
    if batch.trees and any(group.kv_cache_group_id not in batch.cross_groups for group in builders):
        remedy = "begin the step by runtime.begin_step(batch), without metadata"
        raise BatchError("batch.trees", sorted(batch.trees), "have no metadata of one builder", remedy)


def _causal(group: AttentionGroup, batch: StepBatch) -> bool | None:
    """The causality of a group's batch."""
    # Keys of an encoder, or of one rank, have no order relative to the queries.
    at = group.kv_cache_group_id
    if at in batch.cross_groups:
        return False
    if _is_sharded(batch, at) and not isinstance(group.kv_cache_spec, MLAAttentionSpec):
        return False
    return batch.common.for_layers(group.specs).causal


def _twin(group: AttentionGroup, batch: StepBatch) -> Hashable:
    """Equal for groups whose metadata differ in causality, block table and slots only."""
    builder, at, cache = group.builder, group.kv_cache_group_id, group.kv_cache_spec
    key = own_build_key(builder)
    # Each kind has queries and lengths of its own.
    rows = _is_sharded(batch, at) and isinstance(cache, MLAAttentionSpec)
    kind = at in batch.cross_groups, _is_sharded(batch, at), rows
    alike = (cache, group.specs) if key is None else (key,)
    return type(builder), group.backend, group.phase, kind, alike


def _is_sharded(batch: StepBatch, group: int) -> bool:
    return batch.sharded is not None and group in batch.sharded.groups


def build_step(
    group: AttentionGroup,
    common: CommonAttentionMetadata,
    draft_index: int | None,
    common_prefix_len: int = 0,
) -> AttentionMetadata:
    """The metadata of a step by a group's builder, or of draft step `draft_index` if that is given.

    Raises:
        BackendFaultError: the builder gave no metadata.
    """
    made: AttentionMetadata
    if draft_index is None:
        made = checked_metadata(group.backend, "build", group.builder.build(common_prefix_len, common))
    else:
        drafted = group.builder.build_for_drafting(common, draft_index)
        made = checked_metadata(group.backend, "build_for_drafting", drafted)
    return made


_WITHOUT_KEYS: dict[str, Any] = {name: None for each in STEP_INPUTS if each.of_keys for name in each.fields}
"""The changes of a step that take the inputs away which describe the decoder's own keys."""


@checked(common=CommonAttentionMetadata, block_table="R M", slot_mapping="S")
def cross_metadata(
    common: CommonAttentionMetadata, block_table: torch.Tensor, slot_mapping: torch.Tensor
) -> CommonAttentionMetadata:
    """The batch for cross-attention layers: with encoder lengths, their table and slots, and not causal.

    Raises:
        BatchError: the batch has no encoder lengths.
    """
    lengths, host = common.encoder_seq_lens, common.encoder_seq_lens_cpu
    if lengths is None or host is None:
        field = "encoder_seq_lens" if lengths is None else "encoder_seq_lens_cpu"
        raise BatchError(field, None, "is required for cross attention")
    return dataclasses.replace(
        common,
        seq_lens=lengths,
        seq_lens_host=host,
        seq_lens_host_exact=True,
        max_seq_len=int(host.max(initial=0)),
        block_table_tensor=block_table,
        slot_mapping=slot_mapping,
        causal=False,
        **_WITHOUT_KEYS,
        _seq_lens_cpu=None,
        _num_computed_tokens_cpu=None,
    )


def _for_group(
    batch: StepBatch,
    group: int,
    pages: tuple[torch.Tensor, torch.Tensor],
    cache: KVCacheSpec,
    causal: bool | None,
) -> CommonAttentionMetadata:
    table, slots = pages
    if group in batch.cross_groups:
        return cross_metadata(batch.common, table, slots)
    if batch.sharded is not None and _is_sharded(batch, group):
        if isinstance(cache, MLAAttentionSpec):
            rows = batch.sharded.rows(batch.common, table, slots, group)
            rows.causal = causal
            return rows
        return batch.sharded.context(batch.common, table, slots)
    if group == batch.common_group and causal is batch.common.causal:
        return batch.common
    # The batch serves all groups, so the table, slots and causality of one group go into a copy.
    return batch.common.changed(block_table_tensor=table, slot_mapping=slots, causal=causal)


def _check_layers(groups: Sequence[KVCacheGroupSpec], decisions: Mapping[str, Decision]) -> None:
    seen: dict[str, int] = {}
    for group_id, group in enumerate(groups):
        for name in group.layer_names:
            if name in seen:
                limit = f"is in KV group {seen[name]} and again in {group_id}: a layer belongs to one group"
                raise LayoutError("groups", name, limit)
            if name not in decisions:
                raise LayoutError("decisions", name, "has no decision")
            seen[name] = group_id
    missing = [name for name, d in decisions.items() if name not in seen and not d.spec.direct_kv]
    if missing:
        raise LayoutError("groups", sorted(missing), "are in no KV group, and do not have direct K and V")
