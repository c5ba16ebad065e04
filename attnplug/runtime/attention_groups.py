"""Layers that share a builder, and each step's metadata for all of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.config import BuilderConfig
from attnplug.core.errors import BatchError, LayoutError
from attnplug.core.kv_cache_spec import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from attnplug.core.metadata import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.core.spec import LayerSpec
from attnplug.registry.decision import Decision
from attnplug.runtime.step_batch import StepBatch

__all__ = ["AttentionGroup", "WorkspaceUser", "build_attn_metadata", "cross_metadata", "init_attn_backend"]


@runtime_checkable
class WorkspaceUser(Protocol):
    """A builder with one large scratch buffer, which all such builders of a device share."""

    def get_workspace_buffer(self) -> torch.Tensor:
        """The buffer, made when first asked for."""

    def set_workspace_buffer(self, buffer: torch.Tensor) -> None:
        """Take another builder's buffer instead of making one."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttentionGroup:
    """The layers of one KV group that one builder serves.

    Args:
        backend: who serves them.
        layer_names: they.
        kv_cache_spec: what their pages hold.
        kv_cache_group_id: whose block table they read.
        builder: makes their metadata.
    """

    backend: type[AttentionBackend]
    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec
    kv_cache_group_id: int
    builder: AttentionMetadataBuilder[Any]


def init_attn_backend(
    groups: Sequence[KVCacheGroupSpec],
    decisions: Mapping[str, Decision],
    config: BuilderConfig,
    device: torch.device | str,
) -> list[AttentionGroup]:
    """One builder for the layers of each KV group that agree in backend, number of heads and causality.

    Make the impls first: builders read them from `config.layers`.

    Args:
        groups: the KV groups.
        decisions: who serves each layer.
        config: what builders are told.
        device: where metadata lives.

    Raises:
        LayoutError: a layer in no group or in two, or one without a decision.
    """
    _check_layers(groups, decisions)
    made: list[AttentionGroup] = []
    where = torch.device(device)
    shared: torch.Tensor | None = None
    for group_id, group in enumerate(groups):
        alike: dict[Any, list[str]] = {}
        for name in group.layer_names:
            decision = decisions[name]
            key = (decision.get_backend_cls(), decision.spec.num_heads, decision.spec.causal, decision.phase)
            alike.setdefault(key, []).append(name)
        for (backend, *_), names in alike.items():
            builder = backend.get_builder_cls()(group.kv_cache_spec, names, config, where)
            if isinstance(builder, WorkspaceUser):
                if shared is None:
                    shared = builder.get_workspace_buffer()
                else:
                    builder.set_workspace_buffer(shared)
            made.append(AttentionGroup(backend, tuple(names), group.kv_cache_spec, group_id, builder))
    return made


def build_attn_metadata(
    groups: Sequence[AttentionGroup], batch: StepBatch, kv_cache_config: KVCacheConfig
) -> dict[str, AttentionMetadata]:
    """Each layer's metadata of one step: built once per attention group, or updated where a twin was built.

    Two groups with the same kind of builder and pages differ in block table and slots only; where the
    builder supports it, the second gets them by `update_block_table`.

    Raises:
        BatchError: a batch with another number of KV groups.
    """
    count = len(kv_cache_config.kv_cache_groups)
    found = batch.block_tables.shape[0]
    if found != count:
        raise BatchError("batch.block_tables", found, f"must be {count}, one for each KV group")
    commons: dict[int, CommonAttentionMetadata] = {}
    built: dict[Any, AttentionMetadata] = {}
    metadata: dict[str, AttentionMetadata] = {}
    for group in groups:
        at = group.kv_cache_group_id
        table, slots = batch.of_group(at)
        twin = (type(group.builder), group.kv_cache_spec)
        if twin in built and group.builder.supports_update_block_table:
            made = group.builder.update_block_table(built[twin], table, slots)
        else:
            if at not in commons:
                commons[at] = _for_group(batch, at)
            made = group.builder.build(0, commons[at])
            built[twin] = made
        metadata.update(dict.fromkeys(group.layer_names, made))
    return metadata


def cross_metadata(
    common: CommonAttentionMetadata, block_table: torch.Tensor, slot_mapping: torch.Tensor
) -> CommonAttentionMetadata:
    """The batch as cross-attention layers see it: encoder lengths, their table and slots, not causal.

    Raises:
        BatchError: a batch without encoder lengths.
    """
    host = common.encoder_seq_lens_cpu
    if common.encoder_seq_lens is None or host is None:
        raise BatchError("encoder_seq_lens", None, "is required for cross attention")
    return dataclasses.replace(
        common,
        seq_lens=common.encoder_seq_lens,
        seq_lens_host=host,
        seq_lens_host_exact=True,
        max_seq_len=int(host.max(initial=0)),
        block_table_tensor=block_table,
        slot_mapping=slot_mapping,
        causal=False,
        _seq_lens_cpu=None,
        _num_computed_tokens_cpu=None,
    )


def _for_group(batch: StepBatch, group: int) -> CommonAttentionMetadata:
    if group == batch.common_group:
        return batch.common
    table, slots = batch.of_group(group)
    if group in batch.cross_groups:
        return cross_metadata(batch.common, table, slots)
    common = copy.copy(batch.common)
    common.block_table_tensor = table
    common.slot_mapping = slots
    return common


def _check_layers(groups: Sequence[KVCacheGroupSpec], decisions: Mapping[str, Decision]) -> None:
    seen: set[str] = set()
    for group in groups:
        for name in group.layer_names:
            if name in seen:
                raise LayoutError("groups", name, "is in two KV groups")
            if name not in decisions:
                raise LayoutError("decisions", name, "has no decision")
            seen.add(name)
    missing = sorted(name for name, d in decisions.items() if name not in seen and _keeps_pages(d.spec))
    if missing:
        raise LayoutError("groups", missing, "layers are in no KV group")


def _keeps_pages(spec: LayerSpec) -> bool:
    return not spec.direct_kv
