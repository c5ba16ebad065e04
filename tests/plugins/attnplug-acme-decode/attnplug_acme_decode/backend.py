"""The declaration of ACME_DECODE; what runs it is TORCH's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug import AttentionBackend, Feature, Phase

if TYPE_CHECKING:
    from attnplug import Device, LayerSpec
    from attnplug.core.impl import AttentionImpl
    from attnplug.core.metadata import AttentionMetadataBuilder


class AcmeDecodeBackend(AttentionBackend):
    """Decode steps only; of these nearly everything, on CPUs and NVIDIA GPUs."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    supported_phases = (Phase.DECODE,)
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
    )

    @staticmethod
    def get_name() -> str:
        """The name users ask for."""
        return "ACME_DECODE"

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
        """Above every vendor's library: it does one thing."""
        return 300
