"""A backend with narrow limits that never waits for its device: static shapes, lengths read where they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from attnplug.core import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    Feature,
    MultipleOf,
)


@dataclasses.dataclass(eq=False)
class CapturableMetadata(AttentionMetadata):
    """The step's own tensors."""

    common: CommonAttentionMetadata
    slot_mapping: torch.Tensor


class CapturableBuilder(AttentionMetadataBuilder[CapturableMetadata]):
    """Hands on what it was given; decodes are to come first."""

    cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CapturableMetadata:
        return CapturableMetadata(common_attn_metadata, common_attn_metadata.slot_mapping)


class CapturableImpl(AttentionImpl[CapturableMetadata]):
    """Every query beside all rows of its request's table, seen or not."""

    def update_kv_cache(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: Any
    ) -> None:
        slots = slot_mapping.clamp(min=0)
        written = (slot_mapping >= 0)[:, None, None]
        for half, new in enumerate((key, value)):
            pages = kv_cache[:, half]
            # What is not written goes to the null block as the zeros that are there already.
            rows = torch.where(written, new[: slots.shape[0]], 0)
            pages[slots // pages.shape[1], slots % pages.shape[1]] = rows

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: Any,
        value: Any,
        kv_cache: torch.Tensor | None,
        attn_metadata: CapturableMetadata,
        output: torch.Tensor,
        *,
        output_lse: torch.Tensor | None = None,
        **asked: Any,
    ) -> torch.Tensor:
        assert kv_cache is not None
        common, spec, size = attn_metadata.common, self.spec, kv_cache.shape[2]
        rows = torch.arange(common.num_actual_tokens, device=query.device)
        starts, lengths = common.query_start_loc.long(), common.seq_lens.long()
        owner = torch.searchsorted(starts[1:], rows, right=True).clamp(max=common.num_reqs - 1)
        places = lengths[owner] - starts[owner + 1] + rows
        axis = torch.arange(common.block_table_tensor.shape[1] * size, device=query.device)
        low = places - spec.window[0] if spec.window[0] >= 0 else torch.zeros_like(places)
        seen = (axis <= places[:, None]) & (axis >= low[:, None])
        blocks = torch.where(seen, common.block_table_tensor.long()[owner][:, axis // size], 0)
        keys, values = (
            torch.where(seen[:, :, None, None], kv_cache[:, half][blocks, axis % size], 0).float()
            for half in (0, 1)
        )
        grouped = query[: rows.shape[0]].float().unflatten(1, (spec.num_kv_heads, -1))
        scores = torch.einsum("thgd,tlhd->thgl", grouped, keys) * spec.scale
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        found = torch.einsum("thgl,tlhd->thgd", scores.softmax(-1).nan_to_num(), values)
        output[: rows.shape[0]] = found.flatten(1, 2)
        if output_lse is not None:
            output_lse[: rows.shape[0]] = scores.logsumexp(-1).flatten(1, 2)
        return output


class Capturable(AttentionBackend):
    """Two head sizes, one dtype, pages of multiples of 16, one layout."""

    device_types: ClassVar[Sequence[str]] = ("cpu", "cuda", "rocm")
    supported_dtypes: ClassVar[Sequence[object]] = ("bfloat16",)
    features: ClassVar[Feature] = Feature.SLIDING_WINDOW | Feature.LSE
    step_safe: ClassVar[bool] = True
    impl: ClassVar[type[AttentionImpl[Any]]] = CapturableImpl
    builder: ClassVar[type[AttentionMetadataBuilder[Any]]] = CapturableBuilder

    @staticmethod
    def get_name() -> str:
        return "CAPTURABLE"

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl[Any]]:
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder[Any]]:
        return cls.builder

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int | MultipleOf]:
        return (64, 128)

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, spec: Any = None, device: Any = None
    ) -> Sequence[int | MultipleOf]:
        return (MultipleOf(16),)

    @classmethod
    def supported_kv_cache_layouts(cls) -> Sequence[str]:
        return ("HND",)


class KeepsLengths(CapturableBuilder):
    """Copies lengths when it builds, so that a graph reads those of its capture."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        lengths = common_attn_metadata.seq_lens.clone()
        return dataclasses.replace(made, common=dataclasses.replace(made.common, seq_lens=lengths))


def lying(name: str, **parts: Any) -> type[Capturable]:
    """Capturable under another name, with another `impl` or `builder`."""
    return type(name, (Capturable,), {"get_name": staticmethod(lambda: name), **parts})
