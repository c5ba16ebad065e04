"""The declaration of FLASHINFER: paged attention of decoders and cross layers, on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from attnplug.backends.flashinfer.latent_backend import FlashInferMLABackend
from attnplug.backends.flashinfer.options import Options, too_small_scale
from attnplug.backends.libraries import requirements_of, serves_capability
from attnplug.core.backend import AttentionBackend
from attnplug.core.blocks import MultipleOf
from attnplug.core.composite.steps import StepKind, StepPriority, StepRange
from attnplug.core.features import Feature
from attnplug.core.spec import LayerSpec, Phase

if TYPE_CHECKING:
    from attnplug.backends.flashinfer.builder import FlashInferMetadataBuilder
    from attnplug.backends.flashinfer.impl import FlashInferImpl
    from attnplug.core.device import Device

_NAME = "FLASHINFER"
_FP8_CAPABILITY = (8, 9)


class FlashInferBackend(AttentionBackend):
    """FlashInfer 0.5 and later: its decode, prefill and sink wrappers over paged KV caches.

    It does not serve windows of layers that are not causal, keys and values given with the call, or values of
    another head size. Nor ALiBi: FlashInfer has built-in slopes only, and a soft cap scales them.
    """

    requires: ClassVar[Sequence[str | tuple[str, ...]]] = requirements_of(_NAME)
    device_types: ClassVar[Sequence[str]] = ("cuda",)
    supported_dtypes: ClassVar[Sequence[object]] = ("float16", "bfloat16")
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
    features: ClassVar[Feature] = (
        Feature.SLIDING_WINDOW
        | Feature.CHUNKED_LOCAL
        | Feature.SOFT_CAP
        | Feature.SINKS
        | Feature.LSE
        | Feature.NON_CAUSAL
        | Feature.FP8_KV
        | Feature.CROSS
    )
    step_safe: ClassVar[bool] = True
    drafts_on_prefill: ClassVar[bool] = True
    Options: ClassVar[type[Any] | None] = Options

    @staticmethod
    def get_name() -> str:
        """The name, "FLASHINFER"."""
        return _NAME

    @classmethod
    def for_layer(cls, spec: LayerSpec) -> type[AttentionBackend]:
        """FlashInferMLABackend for latent attention; a subclass serves it by a class of its own or not at all."""
        return FlashInferMLABackend if spec.mla is not None and cls is FlashInferBackend else cls

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """240 for decode, 220 for prefill, 230 for both."""
        # Measured on an H200 (page 16, bf16). Decodes of 64 x 8k reach 85 to 104 % of a device
        # copy, and of 8 x 32k 99 %; FlashAttention 4 reaches 53 to 100 % and 56 %. A causal
        # prefill of 16k runs at 600 TFLOP/s, and with FlashAttention 4 at 645. So FLASHINFER
        # decodes before FLASH_ATTN_4 and prefills after it. TRITON decodes as fast without a
        # plan on the host, and comes first on compute capability 9.x. Other devices are not
        # measured; they keep this order, because decodes split their keys in the same way there.
        return {Phase.DECODE: 240, Phase.PREFILL: 220}.get(phase, 230) if phase is not None else 230

    @classmethod
    def get_step_priorities(cls, spec: LayerSpec, device: Device) -> Sequence[StepPriority]:
        """On compute capability 9.x, 205 for drafts: after FLASH_ATTN_4."""
        # Drafts of four tokens take 2 to 11 times TRITON's time on an H200, and FLASH_ATTN_4 1.0 to 1.8: see
        # regret-h200.json. Their kernels do not split the keys of a request there.
        if device.capability is None or device.capability[0] != 9:
            return ()
        return (StepPriority(StepRange(StepKind.DRAFT), 205),)

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int | MultipleOf]:
        """64, 128 and 256: FlashInfer instantiates and tests both templates for these."""
        return (64, 128, 256)

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, spec: LayerSpec | None = None, device: Device | None = None
    ) -> Sequence[int | MultipleOf]:
        """Any; for a chunked layer, divisors of its chunk, because a chunk begins at a page."""
        chunk = None if spec is None else spec.chunk_size
        if chunk is None:
            return (MultipleOf(1),)
        return MultipleOf.dividing(chunk, (MultipleOf(1),))

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int]) -> bool:
        """As `attnplug.backends.libraries` says."""
        return serves_capability(_NAME, capability)

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Refuse combinations that FlashInfer's kernels do not have."""
        fp8 = spec.has_quantized_kv_cache
        if spec.is_windowed and not spec.causal:
            return (
                f"window={spec.window} of a layer that is not causal: "
                "FlashInfer has windows for causal layers only, over the keys before a query"
            )
        problem = too_small_scale(spec)
        if problem is not None:
            return problem
        if spec.has_sinks and spec.logits_soft_cap is not None:
            return "has_sinks with logits_soft_cap: FlashInfer's sink kernel has no soft cap"
        if spec.has_sinks and fp8:
            return f"has_sinks with kv_cache_dtype={spec.kv_cache_dtype!r}: FlashInfer's sink kernel is for 16-bit KV"
        if spec.has_sinks and not spec.causal:
            return "has_sinks with causal=False: FlashInfer's sink kernel is for causal layers"
        if fp8 and device.capability is not None and device.capability < _FP8_CAPABILITY:
            return f"kv_cache_dtype={spec.kv_cache_dtype!r} needs compute capability 8.9"
        return None

    @classmethod
    def compile_key(cls, spec: LayerSpec) -> Hashable | None:
        """FlashInfer compiles a module for head size, dtypes, and whether there are windows, a cap, sinks."""
        return (
            spec.head_size,
            spec.dtype,
            spec.resolved_kv_cache_dtype,
            spec.is_windowed,
            spec.logits_soft_cap is not None,
            spec.has_sinks,
        )

    @classmethod
    def watch_compiling(cls) -> AbstractContextManager[list[str]]:
        """Inside, the list grows by the name of each FlashInfer module that is compiled or loaded."""
        from attnplug.backends.flashinfer.compiling import watch_compiling

        return watch_compiling()

    @classmethod
    def get_impl_cls(cls) -> type[FlashInferImpl]:
        """FlashInferImpl; BackendUnavailableError, with a remedy, if FlashInfer cannot be used here."""
        from attnplug.backends.flashinfer.impl import FlashInferImpl
        from attnplug.backends.flashinfer.library import library

        library()
        return FlashInferImpl

    @classmethod
    def get_builder_cls(cls) -> type[FlashInferMetadataBuilder]:
        """FlashInferMetadataBuilder; BackendUnavailableError as for the impl."""
        from attnplug.backends.flashinfer.builder import FlashInferMetadataBuilder
        from attnplug.backends.flashinfer.library import library

        library()
        return FlashInferMetadataBuilder
