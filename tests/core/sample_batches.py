"""Small batches, and the builder and impl that tests make of them."""

from __future__ import annotations

from typing import Any

import torch

from attnplug.core import (
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    BuilderConfig,
    CommonAttentionMetadata,
    FullAttentionSpec,
)

KV_SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")


def batch(query_lens: list[int], seq_lens: list[int], **fields: Any) -> CommonAttentionMetadata:
    """One step: new tokens and lengths by request, pages of four tokens, slots counted up from 4."""
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    tokens = int(starts[-1])
    given: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts.clone(),
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "num_reqs": len(query_lens),
        "num_actual_tokens": tokens,
        "max_query_len": max(query_lens, default=0),
        "max_seq_len": max(seq_lens, default=0),
        "block_table_tensor": torch.arange(len(query_lens) * 3, dtype=torch.int32).view(-1, 3),
        "slot_mapping": torch.arange(4, 4 + tokens),
    }
    return CommonAttentionMetadata(**given | fields)


class Recorded(AttentionMetadata):
    """What `RecordingBuilder.build` was called with."""

    def __init__(self, common: CommonAttentionMetadata, prefix: int, fast: bool) -> None:
        self.slot_mapping = common.slot_mapping
        self.common, self.prefix, self.fast = common, prefix, fast


class RecordingBuilder(AttentionMetadataBuilder[Recorded]):
    """Keeps the arguments of `build` in the metadata."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Recorded:
        return Recorded(common_attn_metadata, common_prefix_len, fast_build)


def builder(config: BuilderConfig | None = None) -> RecordingBuilder:
    """A builder for one layer on the CPU."""
    return RecordingBuilder(KV_SPEC, ["layers.0"], config or BuilderConfig(), torch.device("cpu"))


class RecordingImpl(AttentionImpl[Any]):
    """Writes nothing and computes nothing; `calls` says what it was asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def update_kv_cache(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        self.calls.append(("update", {k: v for k, v in locals().items() if k not in ("self", "__class__")}))

    def attend(
        self,
        layer: Any,
        query: Any,
        key: Any,
        value: Any,
        kv_cache: Any,
        attn_metadata: Any,
        output: Any,
        **options: Any,
    ) -> Any:
        self.calls.append(("attend", {k: v for k, v in locals().items() if k not in ("self", "__class__")}))
        return output
