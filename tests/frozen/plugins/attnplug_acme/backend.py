"""What the backend can do. A declaration only: torch and kernels are imported behind the two doors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnplug import AttentionBackend, Feature

if TYPE_CHECKING:
    from attnplug import Device, LayerSpec, Phase
    from attnplug.core import AttentionImpl, AttentionMetadataBuilder


class AcmeBackend(AttentionBackend):
    """Causal attention of decoders over paged KV caches, in plain PyTorch.

    attnplug refuses, with a reason, whatever is not declared here: windows, soft caps, sinks, fp8
    caches, and what is invented next year. Declare a thing once the kernels honour it, no sooner.
    """

    # Versions of the libraries with the kernels, as "acme-kernels>=2.1"; torch needs no mention.
    requires = ()
    device_types = ("cpu", "cuda")
    supported_dtypes = ("float32", "bfloat16")
    # "auto" stores K and V as they are computed.
    supported_kv_cache_dtypes = ("auto",)
    # All that a layer may ask beyond sizes and dtypes, as Feature.SLIDING_WINDOW | Feature.SOFT_CAP.
    features = Feature(0)

    @staticmethod
    def get_name() -> str:
        """The name by which users ask for it."""
        return "ACME"

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """Its place in the automatic order: above TORCH (0), below kernels made for a device (100 and up)."""
        return 50

    @classmethod
    def supported_kv_cache_layouts(cls) -> Sequence[str]:
        """Pages with the tokens outside and the heads inside."""
        return ("NHD",)

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl[Any]]:
        """The class that runs a layer."""
        from attnplug_acme.impl import AcmeImpl

        return AcmeImpl

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder[Any]]:
        """The class that turns a step's batch into what the impl reads."""
        from attnplug_acme.builder import AcmeMetadataBuilder

        return AcmeMetadataBuilder
