"""FLA: state layers by the Triton kernels of flash-linear-attention 0.6."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from attnplug.core import AttentionBackend, Device, Feature, LayerSpec
from attnplug.registry import hookimpl

ATTNPLUG_API = (1, 1)


class FlaStates(AttentionBackend):
    """Gated delta nets, KDA, and linear recurrences with a decay per head (Mamba2, lightning attention)."""

    requires: ClassVar[Sequence[str]] = ("flash-linear-attention>=0.6,<0.7", "fla-core>=0.6,<0.7", "einops")
    device_types: ClassVar[Sequence[str]] = ("cuda", "cpu")
    supported_dtypes: ClassVar[Sequence[object]] = ("float16", "bfloat16", "float32")
    # Kernels keep states in float32.
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = ("auto", "float32")
    features: ClassVar[Feature] = Feature.STATE | Feature.STATE_DRAFTS | Feature.STATE_CHECKPOINTS
    supported_state_rules: ClassVar[Sequence[str]] = ("linear", "delta")

    @staticmethod
    def get_name() -> str:
        """The name, "FLA"."""
        return "FLA"

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int]:
        """Powers of 2 up to 256, for keys; a kernel pads values itself."""
        return (16, 32, 64, 128, 256)

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Refuse decays per row without the delta rule, and a CPU whose kernels are not interpreted."""
        if spec.state is not None and (spec.state.rule, spec.state.decay) == ("linear", "row"):
            return "simple_gla has one decay for a head, and this layer has one for each row"
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "on a CPU kernels run only with TRITON_INTERPRET=1"
        return None

    @classmethod
    def get_impl_cls(cls) -> type[Any]:
        """FlaImpl."""
        from attnplug_fla.impl import FlaImpl

        return FlaImpl

    @classmethod
    def get_builder_cls(cls) -> type[Any]:
        """FlaBuilder."""
        from attnplug_fla.impl import FlaBuilder

        return FlaBuilder


@hookimpl
def attnplug_backends() -> Sequence[type[AttentionBackend]]:
    """The backends of this plugin."""
    return (FlaStates,)
