"""The declaration of ACME_SM80; what runs it is TORCH's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnplug import AttentionBackend, Feature
from attnplug.core.blocks import MultipleOf

if TYPE_CHECKING:
    from attnplug import Device, LayerSpec, Phase
    from attnplug.core.impl import AttentionImpl
    from attnplug.core.metadata import AttentionMetadataBuilder


class AcmeSm80Backend(AttentionBackend):
    """Half precision on NVIDIA GPUs from Ampere on; neither sinks, soft caps nor quantised caches."""

    requires = ("flash-attn>=2.7",)
    device_types = ("cuda",)
    supported_dtypes = ("float16", "bfloat16")
    supported_kv_cache_dtypes = ("auto",)
    features = Feature.SLIDING_WINDOW | Feature.LSE | Feature.NON_CAUSAL | Feature.DIRECT_KV

    @staticmethod
    def get_name() -> str:
        """The name users ask for."""
        return "ACME_SM80"

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl[Any]]:
        """The impl of TORCH."""
        from attnplug.backends.torch_native.backend import TorchBackend

        return TorchBackend.get_impl_cls()

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder[Any]]:
        """The builder of TORCH."""
        from attnplug.backends.torch_native.backend import TorchBackend

        return TorchBackend.get_builder_cls()

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """Above all of the vendors' libraries."""
        return 250

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int | MultipleOf]:
        """The two sizes it has kernels for."""
        return (64, 128)

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, spec: LayerSpec | None = None, device: Device | None = None
    ) -> Sequence[int | MultipleOf]:
        """Pages that fill whole tiles."""
        return (MultipleOf(16),)

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int]) -> bool:
        """Ampere and everything after it."""
        return capability >= (8, 0)
