"""Members of composites: backends that record what they are asked, and declare what a test needs."""

from __future__ import annotations

import types
from typing import Any, ClassVar

import torch
from sample_batches import KV_SPEC, RecordingBuilder

from attnplug.core import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    BuilderConfig,
    Feature,
    LayerSpec,
    composite_backend,
)

SPEC = LayerSpec(num_heads=2, num_kv_heads=1, head_size=8, dtype="float32")


class DecodesFirst(RecordingBuilder):
    """Orders single tokens first, and says how it was asked to build."""

    reorder_batch_threshold = 1
    supports_update_block_table = True
    cudagraph_support = AttentionCGSupport.ALWAYS

    def build_for_cudagraph_capture(self, common_attn_metadata):
        made = self.build(0, common_attn_metadata)
        made.way = "capture"
        return made

    def build_for_drafting(self, common_attn_metadata, draft_index):
        made = self.build(0, common_attn_metadata, True)
        made.way = draft_index
        return made

    def update_block_table(self, metadata, blk_table, slot_mapping):
        made = self.build(0, metadata.common)
        made.updated = blk_table, slot_mapping
        return made


class TakesAnyOrder(DecodesFirst):
    reorder_batch_threshold = None


class CapturesNothing(DecodesFirst):
    cudagraph_support = AttentionCGSupport.NEVER


class NeedsLengths(RecordingBuilder):
    needs_host_seq_lens = "exact"


class RecordingImpl(AttentionImpl[Any]):
    """Notes its calls in a list that all impls of a test share, and writes its own number."""

    calls: ClassVar[list[tuple[Any, ...]]] = []
    number: ClassVar[float] = 0.0

    def update_kv_cache(self, layer, key, value, kv_cache, slot_mapping):
        self.calls.append((self.number, "write", key.shape[0], slot_mapping.tolist()))

    def attend(self, layer, query, key, value, kv_cache, attn_metadata, output, *, output_lse=None, **rest):
        keys = None if key is None else key[:, 0, 0].tolist()
        self.calls.append((self.number, "attend", query[:, 0, 0].tolist(), keys, rest))
        output[:] = self.number
        if output_lse is not None:
            output_lse[:] = -self.number
        return output


def member(
    name: str,
    builder: type[AttentionMetadataBuilder[Any]] = DecodesFirst,
    number: float = 1.0,
    **attributes: Any,
) -> type[AttentionBackend]:
    """A backend of these parts; functions among its attributes are called without the class."""
    impl = type(f"{name}Impl", (RecordingImpl,), {"number": number, "can_return_lse_for_decode": number == 2})
    made = {
        key: staticmethod(value) if isinstance(value, types.FunctionType) else value
        for key, value in attributes.items()
    }
    declared = {
        "device_types": ("cpu", "cuda"),
        "supported_dtypes": ("float32", "bfloat16"),
        "features": ~Feature(0) & ~(Feature.MLA | Feature.SPARSE | Feature.STATE),
        "get_name": staticmethod(lambda: name),
        "get_impl_cls": classmethod(lambda cls: impl),
        "get_builder_cls": classmethod(lambda cls: builder),
    }
    return type(name, (AttentionBackend,), declared | made)


def rows(count: int, heads: int = 2) -> torch.Tensor:
    """`[count, heads, 8]` whose rows hold their own numbers."""
    return torch.arange(count).float().view(-1, 1, 1).expand(-1, heads, 8).clone()


ONE, TWO = member("ONE"), member("TWO", number=2.0)
MIXED = [1, 1, 5, 1], [9, 3, 8, 1]
"""New tokens and lengths of two decodes, a prefill and a short request behind it."""


def builder(
    prefill: type[AttentionBackend] = ONE,
    decode: type[AttentionBackend] = TWO,
    spec: Any = KV_SPEC,
    layers: Any = (),
    **config: Any,
) -> Any:
    """The builder of a composite for one layer."""
    made = composite_backend(prefill, decode).get_builder_cls()
    return made(spec, ["layers.0"], BuilderConfig(layers=dict(layers), **config), torch.device("cpu"))
