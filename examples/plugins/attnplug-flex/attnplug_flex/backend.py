"""The declaration of FLEX. No torch here: this module is imported wherever backends are listed."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from attnplug.core import AttentionBackend, Feature

if TYPE_CHECKING:
    from collections.abc import Hashable

    from attnplug.core import Device, LayerSpec

    from attnplug_flex.impl import FlexImpl
    from attnplug_flex.metadata import FlexMetadataBuilder

__all__ = ["FlexBackend", "FlexOptions"]


@dataclasses.dataclass(frozen=True, slots=True)
class FlexOptions:
    """The options of a user.

    Args:
        compile: run the kernels that torch.compile generates, one for each `compile_key`; CUDA only, and head
            sizes of at least 16. Without it FlexAttention runs as single operations, on any device.
    """

    compile: bool = False


class FlexBackend(AttentionBackend):
    """PyTorch FlexAttention over gathered pages.

    Pages are gathered because a kernel that reads them where they are multiplies a weight of 0 with rows that
    no token has been written to, and those may hold NaN. The builder reads lengths on the host, so the backend
    is not `step_safe`.
    """

    requires = ("torch>=2.9",)
    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2")
    features = (
        Feature.SLIDING_WINDOW
        | Feature.CHUNKED_LOCAL
        | Feature.SOFT_CAP
        | Feature.SINKS
        | Feature.ALIBI
        | Feature.LSE
        | Feature.HEAD_SIZE_V
        | Feature.NON_CAUSAL
        | Feature.DIRECT_KV
        | Feature.FP8_KV
        | Feature.CROSS
        | Feature.ENCODER
    )
    Options = FlexOptions

    @staticmethod
    def get_name() -> str:
        """The name, "FLEX"."""
        return "FLEX"

    @classmethod
    def get_impl_cls(cls) -> type[FlexImpl]:
        """FlexImpl; imports torch."""
        from attnplug_flex.impl import FlexImpl

        return FlexImpl

    @classmethod
    def get_builder_cls(cls) -> type[FlexMetadataBuilder]:
        """FlexMetadataBuilder; imports torch."""
        from attnplug_flex.metadata import FlexMetadataBuilder

        return FlexMetadataBuilder

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Direct K and V are never stored, so they cannot have a storage dtype of their own."""
        if spec.direct_kv and spec.resolved_kv_cache_dtype != spec.dtype:
            return f"direct_kv stores nothing, so kv_cache_dtype={spec.kv_cache_dtype!r} cannot be honoured"
        return None

    @classmethod
    def compile_key(cls, spec: LayerSpec) -> Hashable:
        """Sizes, dtype, scale and score modification; what is seen, and by how much it is capped, are data."""
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.head_size_v)
        return (*sizes, spec.dtype, spec.scale, spec.logits_soft_cap is not None, spec.has_alibi)
