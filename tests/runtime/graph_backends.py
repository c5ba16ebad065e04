"""A backend of plain torch operations that a CUDA graph can hold: static shapes, no wait for the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from fake_backends import backend

from attnplug import AttentionBackend
from attnplug.core import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder, Feature
from attnplug.core.impl import AttentionImpl
from attnplug.core.metadata import CommonAttentionMetadata


@dataclasses.dataclass(eq=False)
class GraphMetadata(AttentionMetadata):
    common: CommonAttentionMetadata
    slot_mapping: torch.Tensor
    captured: bool = False


class GraphBuilder(AttentionMetadataBuilder[GraphMetadata]):
    """Hands on the step's own tensors."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> GraphMetadata:
        return GraphMetadata(common_attn_metadata, common_attn_metadata.slot_mapping)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> GraphMetadata:
        return dataclasses.replace(self.build(0, common_attn_metadata), captured=True)


class GraphImpl(AttentionImpl[GraphMetadata]):
    """Full and sliding-window attention of any batch, a row of queries at a time over all pages."""

    def update_kv_cache(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        written = (slot_mapping >= 0)[:, None, None]
        slots = slot_mapping.clamp(min=0)
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
        attn_metadata: GraphMetadata,
        output: torch.Tensor,
        **asked: Any,
    ) -> torch.Tensor:
        assert kv_cache is not None
        common, spec = attn_metadata.common, self.spec
        rows = torch.arange(common.num_actual_tokens, device=query.device)
        starts, lengths = common.query_start_loc.long(), common.seq_lens.long()
        owner = torch.searchsorted(starts[1:], rows, right=True).clamp(max=common.num_reqs - 1)
        places = lengths[owner] - starts[owner + 1] + rows
        axis = torch.arange(common.max_seq_len, device=query.device)
        size = kv_cache.shape[2]
        blocks = common.block_table_tensor.long()[owner][:, axis // size]
        keys, values = (kv_cache[:, half][blocks, axis % size] for half in (0, 1))
        groups = spec.num_heads // spec.num_kv_heads
        keys, values = (each.repeat_interleave(groups, dim=2) for each in (keys, values))
        scores = torch.einsum("thd,tlhd->thl", query[: rows.shape[0]], keys) * spec.scale
        seen = axis < lengths[owner, None]
        if spec.causal:
            seen &= axis <= places[:, None]
        if spec.window[0] >= 0:
            seen &= axis >= places[:, None] - spec.window[0]
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        weights = scores.softmax(-1).nan_to_num()
        output[: rows.shape[0]] = torch.einsum("thl,tlhd->thd", weights, values)
        if (lse := asked.get("output_lse")) is not None:
            lse[: rows.shape[0]] = scores.logsumexp(-1)
        return output


def graph_backend(
    level: AttentionCGSupport, name: str = "GRAPHS", priority: int = 50, **attributes: Any
) -> type[AttentionBackend]:
    """A backend whose builder declares `level`."""
    builder = type("DeclaringBuilder", (GraphBuilder,), {"cudagraph_support": level})
    doors = {"get_impl_cls": lambda: GraphImpl, "get_builder_cls": lambda: builder}
    features = attributes.pop("features", Feature.SLIDING_WINDOW | Feature.CROSS | Feature.NON_CAUSAL)
    return backend(name, priority, features=features, **doors, **attributes)
