"""Layers that share a builder, and each step's metadata for all of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.blocks import MultipleOf
from attnplug.core.config import BuilderConfig
from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.kv_cache_spec import CrossAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from attnplug.core.metadata import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.decision import Decision
from attnplug.runtime.step_batch import StepBatch

__all__ = [
    "AttentionGroup",
    "WorkspaceUser",
    "build_attn_metadata",
    "cross_metadata",
    "init_attn_backend",
    "share_workspace",
]


@runtime_checkable
class WorkspaceUser(Protocol):
    """A builder with one large scratch buffer, which all such builders of a device share."""

    @property
    def workspace_bytes(self) -> int:
        """What the buffer must have."""
        ...

    def get_workspace_buffer(self) -> torch.Tensor:
        """The buffer, made when first asked for."""
        ...

    def set_workspace_buffer(self, buffer: torch.Tensor) -> None:
        """Take another builder's buffer, which is large enough, instead of making one."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttentionGroup:
    """The layers of one KV group that one builder serves.

    Args:
        backend: who serves them.
        layer_names: they.
        kv_cache_spec: what their pages hold.
        kv_cache_group_id: whose block table they read.
        builder: makes their metadata.
        specs: what they ask of the backend.
        phase: the phase it serves them in; None for both.
    """

    backend: type[AttentionBackend]
    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec
    kv_cache_group_id: int
    builder: AttentionMetadataBuilder[Any]
    specs: frozenset[LayerSpec]
    phase: Phase | None = None


def init_attn_backend(
    groups: Sequence[KVCacheGroupSpec],
    decisions: Mapping[str, Decision],
    config: BuilderConfig,
    device: torch.device | str,
) -> list[AttentionGroup]:
    """One builder for the layers of each KV group that agree in backend, number of heads and causality.

    Make the impls first: builders read them from `config.layers`. Layers with direct K and V are in no
    KV group and get no builder here. Builders with a workspace share one.

    Args:
        groups: the KV groups.
        decisions: who serves each layer.
        config: what builders are told.
        device: where metadata lives.

    Raises:
        LayoutError: a layer in no group or in two, one without a decision, or pages of a size that its
            backend cannot read.
        NoBackendError: a layer that no backend serves.
    """
    _check_layers(groups, decisions)
    made: list[AttentionGroup] = []
    where = torch.device(device)
    for group_id, group in enumerate(groups):
        alike: dict[Any, list[str]] = {}
        for name in group.layer_names:
            decision = decisions[name]
            backend = decision.get_backend_cls()
            _check_block_size(name, decision, backend, group.kv_cache_spec.block_size)
            key = (backend, decision.phase, decision.spec.num_heads, decision.spec.causal)
            alike.setdefault(key, []).append(name)
        for (backend, phase, *_), names in alike.items():
            builder: AttentionMetadataBuilder[Any] = backend.get_builder_cls()(
                group.kv_cache_spec, names, config, where
            )
            specs = frozenset(decisions[name].spec for name in names)
            made.append(
                AttentionGroup(backend, tuple(names), group.kv_cache_spec, group_id, builder, specs, phase)
            )
    share_workspace(group.builder for group in made)
    return made


def share_workspace(builders: Iterable[object]) -> None:
    """Give those of the builders that use a workspace one together: the largest that any of them needs."""
    users = [builder for builder in builders if isinstance(builder, WorkspaceUser)]
    if len(users) < 2:
        return
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
) -> dict[str, AttentionMetadata]:
    """Each layer's metadata of one step: built once per attention group, or updated where a twin was built.

    Two groups whose layers ask the same of the same backend, over the same kind of pages, differ in
    block table and slots only; where the builder supports it, the second gets them by
    `update_block_table`.

    Args:
        builders: the attention groups.
        batch: the step.
        kv_cache_config: the KV groups.
        for_capture: whether a CUDA graph is captured with it. The same groups are updated then, since a
            step before a replay builds again what the captured layers read.

    Raises:
        BatchError: a batch with another number of KV groups, or with other cross groups.
    """
    _check_groups(batch, kv_cache_config)
    commons: dict[int, CommonAttentionMetadata] = {}
    built: dict[Any, AttentionMetadata] = {}
    metadata: dict[str, AttentionMetadata] = {}
    for group in builders:
        at = group.kv_cache_group_id
        # Cross groups have a CrossAttentionSpec, and so no twin among the others.
        twin = (type(group.builder), group.backend, group.phase, group.kv_cache_spec, group.specs)
        if twin in built and group.builder.supports_update_block_table:
            made: AttentionMetadata = group.builder.update_block_table(built[twin], *batch.of_group(at))
        else:
            if at not in commons:
                commons[at] = _for_group(batch, at)
            if for_capture:
                made = group.builder.build_for_cudagraph_capture(commons[at])
            else:
                made = group.builder.build(0, commons[at])
            built[twin] = made
        for name in group.layer_names:
            metadata[name] = made
    return metadata


def cross_metadata(
    common: CommonAttentionMetadata, block_table: torch.Tensor, slot_mapping: torch.Tensor
) -> CommonAttentionMetadata:
    """The batch as cross-attention layers see it: encoder lengths, their table and slots, not causal.

    Raises:
        BatchError: a batch without encoder lengths.
    """
    lengths, host = common.encoder_seq_lens, common.encoder_seq_lens_cpu
    if lengths is None:
        raise BatchError("encoder_seq_lens", None, "is required for cross attention")
    if host is None:
        raise BatchError("encoder_seq_lens_cpu", None, "is required for cross attention")
    return dataclasses.replace(
        common,
        seq_lens=lengths,
        seq_lens_host=host,
        seq_lens_host_exact=True,
        max_seq_len=int(host.max(initial=0)),
        block_table_tensor=block_table,
        slot_mapping=slot_mapping,
        causal=False,
        # What follows is said of the decoder's own keys.
        key_start_loc=None,
        key_start_loc_cpu=None,
        dcp_local_seq_lens=None,
        dcp_local_seq_lens_cpu=None,
        _seq_lens_cpu=None,
        _num_computed_tokens_cpu=None,
    )


def _for_group(batch: StepBatch, group: int) -> CommonAttentionMetadata:
    table, slots = batch.of_group(group)
    if group in batch.cross_groups:
        return cross_metadata(batch.common, table, slots)
    if group == batch.common_group:
        return batch.common
    common = copy.copy(batch.common)
    common.block_table_tensor = table
    common.slot_mapping = slots
    return common


def _check_groups(batch: StepBatch, config: KVCacheConfig) -> None:
    groups, found = config.kv_cache_groups, batch.block_tables.shape[0]
    if found != len(groups):
        raise BatchError("batch.block_tables", found, f"must be {len(groups)}, one for each KV group")
    cross = {i for i, group in enumerate(groups) if isinstance(group.kv_cache_spec, CrossAttentionSpec)}
    if cross != batch.cross_groups:
        limit = f"must be {sorted(cross)}, the KV groups with a CrossAttentionSpec"
        raise BatchError("batch.cross_groups", sorted(batch.cross_groups), limit)


def _check_layers(groups: Sequence[KVCacheGroupSpec], decisions: Mapping[str, Decision]) -> None:
    seen: dict[str, int] = {}
    for group_id, group in enumerate(groups):
        for name in group.layer_names:
            if name in seen:
                limit = f"is in KV group {seen[name]} and again in {group_id}: a layer is in one, once"
                raise LayoutError("groups", name, limit)
            if name not in decisions:
                raise LayoutError("decisions", name, "has no decision")
            seen[name] = group_id
    missing = [name for name, d in decisions.items() if name not in seen and not d.spec.direct_kv]
    if missing:
        raise LayoutError("groups", sorted(missing), "are in no KV group, and do not have direct K and V")


def _check_block_size(
    name: str, decision: Decision, backend: type[AttentionBackend], block_size: int
) -> None:
    sizes = backend.get_supported_kernel_block_sizes(decision.spec, decision.device)
    if not MultipleOf.allows(sizes, block_size):
        readable = ", ".join(map(str, sizes))
        limit = f"of layer {name} cannot be read by {backend.get_name()}, which reads {readable}"
        raise LayoutError("block_size", block_size, limit)
