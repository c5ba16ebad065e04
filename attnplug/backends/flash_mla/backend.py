"""The declaration of FLASH_MLA: latent attention on NVIDIA GPUs of compute capability 9.0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from attnplug.backends.libraries import requirements_of, serves_capability
from attnplug.core.blocks import MultipleOf
from attnplug.core.features import Feature
from attnplug.core.mla.backend import MLADecodeBackend, QueryLens
from attnplug.core.spec import LayerSpec, Phase

if TYPE_CHECKING:
    from attnplug.backends.flash_mla.builder import FlashMLABuilder
    from attnplug.backends.flash_mla.impl import FlashMLAImpl
    from attnplug.core.device import Device

_NAME = "FLASH_MLA"
PAGE = 64
"""Tokens of a page that the dense kernels read."""
_SPARSE_HEADS = (64, 128)
# The dense kernel masks with a logit of -1e33, and begins with a maximum of -1e30. The scale is times log2(e).
_LEAST_SCALE = 1e-3


class FlashMLABackend(MLADecodeBackend):
    """FlashMLA's dense decode over pages of 64 tokens, in 16 bits or in e4m3, and its sparse kernel over chosen latents.

    Prefills of dense layers run on another backend. Over 8-bit latents FlashMLA multiplies 8-bit queries and weights.
    """

    requires: ClassVar[Sequence[str | tuple[str, ...]]] = requirements_of(_NAME)
    device_types: ClassVar[Sequence[str]] = ("cuda",)
    # The kit tries features in the first, and sparse layers have no other.
    supported_dtypes: ClassVar[Sequence[object]] = ("bfloat16", "float16")
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = ("auto", "fp8", "fp8_e4m3")
    features: ClassVar[Feature] = Feature.MLA | Feature.SPARSE | Feature.LSE | Feature.FP8_KV
    supported_sparse_kinds: ClassVar[Sequence[str]] = ("token_topk", "block")
    # The kernels allocate their outputs and parts of rows, whose size does not depend on the context.
    step_safe: ClassVar[bool] = True
    quantizes_queries: ClassVar[bool] = True

    latent_sizes: ClassVar[Sequence[tuple[int, int]]] = ((512, 64), (512, 0))
    query_layout = "packed"
    query_lens: ClassVar[QueryLens | str] = QueryLens.UNIFORM
    decode_threshold: ClassVar[int] = 8

    @staticmethod
    def get_name() -> str:
        """The name, "FLASH_MLA"."""
        return _NAME

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """120, before TRITON, for dense layers of at least 16 heads in 16 bits; else 90."""
        # On an H200 decodes of many requests take 0.98 to 0.94 of TRITON's time with 16 heads, 0.92 with 32, 0.92 with 64 and
        # 0.77 with 128; 20 drafts of 3 tokens 0.92 to 0.78. TRITON declares steps of few requests, which take longer here: see
        # step-choice-h200.json and mla-flash-mla-h200.json. Latents of 8 bits have rounded queries, which a user shall ask for.
        # The sparse kernel is not measured.
        return 120 if spec.num_heads >= 16 and _is_dense_of_16_bits(spec) else 90

    @classmethod
    def padded_heads(cls, num_heads: int) -> int:
        """64 or 128 for sparse layers, whose kernel has no other number; all heads of dense layers."""
        if not cls.is_selecting:
            return num_heads
        return next((heads for heads in _SPARSE_HEADS if num_heads <= heads), num_heads)

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, spec: LayerSpec | None = None, device: Device | None = None
    ) -> Sequence[int | MultipleOf]:
        """64 for dense layers; any for sparse ones, whose kernel reads single tokens."""
        return (MultipleOf(1),) if cls.is_selecting else (PAGE,)

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int]) -> bool:
        """As `attnplug.backends.libraries` says."""
        return serves_capability(_NAME, capability)

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Refuse other sizes, dtypes that a kernel lacks, and more heads than the sparse kernel has."""
        problem = super().supports_combination(spec, device)
        if problem is not None or spec.mla is None:
            return problem
        return _sparse_problem(spec) if spec.sparse is not None else _dense_problem(spec)

    @classmethod
    def get_impl_cls(cls) -> type[FlashMLAImpl]:
        """FlashMLAImpl; BackendUnavailableError, with a remedy, if FlashMLA cannot be used here."""
        from attnplug.backends.flash_mla.impl import FlashMLAImpl
        from attnplug.backends.flash_mla.library import library

        library()
        return FlashMLAImpl

    @classmethod
    def get_builder_cls(cls) -> type[FlashMLABuilder]:
        """FlashMLABuilder; BackendUnavailableError as for the impl."""
        from attnplug.backends.flash_mla.builder import FlashMLABuilder
        from attnplug.backends.flash_mla.library import library

        library()
        return FlashMLABuilder


def _dense_problem(spec: LayerSpec) -> str | None:
    if spec.has_quantized_kv_cache:
        stored = f"kv_cache_dtype={spec.kv_cache_dtype!r}"
        if spec.dtype != "bfloat16":
            return f"{stored} with dtype={spec.dtype}: FlashMLA's outputs over 8-bit latents are bfloat16"
        if spec.mla is not None and not spec.mla.qk_rope_head_dim:
            return f"{stored} with qk_rope_head_dim=0: FlashMLA's 8-bit latents have 512 + 64 elements"
        return None
    if spec.scale < _LEAST_SCALE:
        return (
            f"scale={spec.scale:g} is below {_LEAST_SCALE:g}: "
            "FlashMLA masks with a finite logit before it scales, so masked keys would get weight"
        )
    return None


def _sparse_problem(spec: LayerSpec) -> str | None:
    if spec.sparse is None:
        return None
    if spec.has_quantized_kv_cache:
        return (
            f"sparse with kv_cache_dtype={spec.kv_cache_dtype!r}: FlashMLA reads chosen 8-bit latents "
            "in its own format of 656 bytes, with four scales"
        )
    if spec.dtype != "bfloat16":
        return f"sparse with dtype={spec.dtype}: FlashMLA's sparse kernel is for bfloat16"
    if spec.num_heads > _SPARSE_HEADS[-1]:
        return f"num_heads={spec.num_heads} is more than {_SPARSE_HEADS[-1]} of FlashMLA's sparse kernel"
    return None


def _is_dense_of_16_bits(spec: LayerSpec) -> bool:
    """Whether a layer is of the kind whose times were measured."""
    return spec.sparse is None and not spec.has_quantized_kv_cache
