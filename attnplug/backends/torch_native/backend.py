"""The declarations of TORCH: every feature, those of latent attention and of state layers in classes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attnplug.core.backend import AttentionBackend
from attnplug.core.features import Feature
from attnplug.core.kv_format import CODEC
from attnplug.core.mla.backend import MLADecodeBackend, QueryLens
from attnplug.core.spec import LayerSpec, Phase
from attnplug.core.state.dims import STATE_DTYPES, STATE_RULES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.backends.torch_native.builder import TorchMetadataBuilder
    from attnplug.backends.torch_native.impl import TorchImpl
    from attnplug.backends.torch_native.latent import TorchMLABuilder, TorchMLAImpl
    from attnplug.backends.torch_native.state.builder import TorchStateBuilder
    from attnplug.backends.torch_native.state.impl import TorchStateImpl
    from attnplug.core.device import Device


class TorchBackend(AttentionBackend):
    """Attention in plain PyTorch: any device, any head size, any block size.

    It is last in the automatic order. It reads host lengths and gathers pages, so it is not `step_safe`.
    """

    device_types: ClassVar[Sequence[str]] = ("cpu", "cuda", "rocm", "xpu", "mps")
    supported_dtypes: ClassVar[Sequence[object]] = ("float16", "bfloat16", "float32")
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = (
        "auto",
        "float16",
        "bfloat16",
        "float32",
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        CODEC,
    )
    features: ClassVar[Feature] = (
        Feature.SLIDING_WINDOW
        | Feature.CHUNKED_LOCAL
        | Feature.SOFT_CAP
        | Feature.SINKS
        | Feature.ALIBI
        | Feature.MM_PREFIX
        | Feature.SPARSE
        | Feature.LSE
        | Feature.HEAD_SIZE_V
        | Feature.NON_CAUSAL
        | Feature.DIRECT_KV
        | Feature.FP8_KV
        | Feature.HEAD_SCALES
        | Feature.CROSS
        | Feature.ENCODER
        | Feature.INVARIANCE
    )

    supported_invariances: ClassVar[Sequence[str]] = ("batch",)
    supported_sparse_kinds: ClassVar[Sequence[str]] = ("token_topk", "block")
    serves_dense: ClassVar[bool] = True

    @staticmethod
    def get_name() -> str:
        """The name, "TORCH"."""
        return "TORCH"

    @classmethod
    def for_layer(cls, spec: LayerSpec) -> type[AttentionBackend]:
        """A class of its own for latent attention and for state layers; a subclass of this one has none of them."""
        if cls is not TorchBackend:
            return cls
        if spec.state is not None:
            return TorchStateBackend
        return TorchMLABackend.for_layer(spec) if spec.mla is not None else cls

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """0: every other backend that serves the layer comes first."""
        return 0

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Refuse a storage dtype for direct K and V, which are never stored, and equal bits on other devices than a CPU."""
        if spec.invariance and device.type != "cpu":
            return f"equal bits are kept on a CPU alone: on {device.type} libraries choose the order of sums"
        if spec.direct_kv and spec.resolved_kv_cache_dtype != spec.dtype:
            return f"direct_kv stores nothing, so kv_cache_dtype={spec.kv_cache_dtype!r} cannot be honoured"
        return None

    @classmethod
    def get_impl_cls(cls) -> type[TorchImpl]:
        """TorchImpl."""
        from attnplug.backends.torch_native.impl import TorchImpl

        return TorchImpl

    @classmethod
    def get_builder_cls(cls) -> type[TorchMetadataBuilder]:
        """TorchMetadataBuilder."""
        from attnplug.backends.torch_native.builder import TorchMetadataBuilder

        return TorchMetadataBuilder


class TorchMLABackend(MLADecodeBackend):
    """Latent attention in plain PyTorch: any dimensions, any number of heads, any block size."""

    device_types: ClassVar[Sequence[str]] = TorchBackend.device_types
    supported_dtypes: ClassVar[Sequence[object]] = TorchBackend.supported_dtypes
    # No format with a codec has pages for latents.
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = tuple(
        name for name in TorchBackend.supported_kv_cache_dtypes if name != CODEC
    )
    supported_phases: ClassVar[Sequence[Phase | str]] = tuple(Phase)
    features: ClassVar[Feature] = Feature.MLA | Feature.SPARSE | Feature.LSE | Feature.FP8_KV
    supported_sparse_kinds: ClassVar[Sequence[str]] = TorchBackend.supported_sparse_kinds
    prefill: ClassVar[type[AttentionBackend] | None] = TorchBackend

    query_lens: ClassVar[QueryLens | str] = QueryLens.ANY
    decode_threshold: ClassVar[int] = 16

    @staticmethod
    def get_name() -> str:
        """The name, "TORCH"."""
        return TorchBackend.get_name()

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """0: every other backend that serves the layer comes first."""
        return 0

    @classmethod
    def get_impl_cls(cls) -> type[TorchMLAImpl]:
        """TorchMLAImpl."""
        from attnplug.backends.torch_native.latent import TorchMLAImpl

        return TorchMLAImpl

    @classmethod
    def get_builder_cls(cls) -> type[TorchMLABuilder]:
        """TorchMLABuilder."""
        from attnplug.backends.torch_native.latent import TorchMLABuilder

        return TorchMLABuilder


class TorchStateBackend(AttentionBackend):
    """State layers in plain PyTorch: any sizes, any number of drafts, checkpoints at any distance."""

    device_types: ClassVar[Sequence[str]] = TorchBackend.device_types
    supported_dtypes: ClassVar[Sequence[object]] = TorchBackend.supported_dtypes
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = STATE_DTYPES
    features: ClassVar[Feature] = Feature.STATE | Feature.STATE_DRAFTS | Feature.STATE_CHECKPOINTS
    supported_state_rules: ClassVar[Sequence[str]] = STATE_RULES

    @staticmethod
    def get_name() -> str:
        """The name, "TORCH"."""
        return TorchBackend.get_name()

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """0: every other backend that serves the layer comes first."""
        return 0

    @classmethod
    def get_impl_cls(cls) -> type[TorchStateImpl]:
        """TorchStateImpl."""
        from attnplug.backends.torch_native.state.impl import TorchStateImpl

        return TorchStateImpl

    @classmethod
    def get_builder_cls(cls) -> type[TorchStateBuilder]:
        """TorchStateBuilder."""
        from attnplug.backends.torch_native.state.builder import TorchStateBuilder

        return TorchStateBuilder
