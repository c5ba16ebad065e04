"""Backends that only declare, and builders that keep what they were given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from attnplug.core import (
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    Device,
    Feature,
    LayerSpec,
    MultipleOf,
)
from attnplug.core.spec import Phase
from attnplug.registry.selection.decision import Decision

CPU = Device("cpu")


class Built(AttentionMetadata):
    """What `build` was called with, and the tables that were swapped in afterwards."""

    def __init__(self, common: CommonAttentionMetadata, builder: Any) -> None:
        self.common, self.builder = common, builder
        self.block_table, self.slot_mapping = common.block_table_tensor, common.slot_mapping
        self.updated_by: Any = None


class KeepingBuilder(AttentionMetadataBuilder[Built]):
    """Counts its builds."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.builds = 0

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Built:
        self.builds += 1
        return Built(common_attn_metadata, self)


class SwappingBuilder(KeepingBuilder):
    """Takes another group's table without a second build."""

    supports_update_block_table = True

    def update_block_table(
        self, metadata: Built, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> Built:
        made = Built(metadata.common, metadata.builder)
        made.block_table, made.slot_mapping, made.updated_by = blk_table, slot_mapping, self
        return made


class WorkspaceBuilder(KeepingBuilder):
    """Has a scratch buffer, made when first asked for."""

    made = 0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.workspace: torch.Tensor | None = None
        self.workspace_bytes = 32

    def get_workspace_buffer(self) -> torch.Tensor:
        if self.workspace is None:
            type(self).made += 1
            self.workspace = torch.zeros(8)
        return self.workspace

    def set_workspace_buffer(self, buffer: torch.Tensor) -> None:
        self.workspace = buffer


class Plain(AttentionBackend):
    """Reads both layouts."""

    builder: ClassVar[type[KeepingBuilder]] = KeepingBuilder

    @staticmethod
    def get_name() -> str:
        return "PLAIN"

    @classmethod
    def get_impl_cls(cls) -> Any:
        raise NotImplementedError

    @classmethod
    def get_builder_cls(cls) -> type[KeepingBuilder]:
        return cls.builder


class Swapping(Plain):
    builder = SwappingBuilder


class Workspace(Plain):
    builder = WorkspaceBuilder


class Latent(Plain):
    features = Feature.MLA


class HeadFirst(Plain):
    """Reads HND only, and pages of 16 tokens."""

    @staticmethod
    def get_name() -> str:
        return "HEAD_FIRST"

    @classmethod
    def supported_kv_cache_layouts(cls) -> Sequence[str]:
        return ("HND",)

    @classmethod
    def get_supported_kernel_block_sizes(cls, spec: Any = None, device: Any = None) -> Sequence[Any]:
        return (16, MultipleOf(64))


class KeysFirst(Plain):
    """All keys before all values: its pages are in two pieces."""

    @classmethod
    def get_kv_cache_stride_order(
        cls, include_num_layers_dimension: bool = False, **options: Any
    ) -> tuple[int, ...]:
        return (1, 0, 2, 3, 4)


class Muddled(Plain):
    """Its order is no order."""

    @classmethod
    def get_kv_cache_stride_order(
        cls, include_num_layers_dimension: bool = False, **options: Any
    ) -> tuple[int, ...]:
        return (0, 1, 2, 3, 3)


def decision(spec: LayerSpec, backend: type[AttentionBackend] | None = Plain, **said: Any) -> Decision:
    """As if `backend` had been chosen."""
    name = None if backend is None else backend.get_name()
    phase: Phase | None = said.pop("phase", None)
    return Decision(spec, CPU, phase, name, (), backend_cls=backend, **said)
