"""The declaration that all generations of FlashAttention share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from attnplug.backends.libraries import serves_capability
from attnplug.core.backend import AttentionBackend
from attnplug.core.blocks import MultipleOf
from attnplug.core.features import Feature
from attnplug.core.spec import AttentionType

if TYPE_CHECKING:
    from attnplug.backends.flash_attn.builder import FlashAttnMetadataBuilder
    from attnplug.core.device import Device
    from attnplug.core.spec import LayerSpec

__all__ = ["COMMON_FEATURES", "FlashAttnBackend"]

COMMON_FEATURES = (
    Feature.SLIDING_WINDOW
    | Feature.CHUNKED_LOCAL
    | Feature.SOFT_CAP
    | Feature.LSE
    | Feature.NON_CAUSAL
    | Feature.DIRECT_KV
    | Feature.CROSS
    | Feature.ENCODER
)
"""Features of every generation; chunks are given to it as virtual requests."""


class FlashAttnBackend(AttentionBackend):
    """Paged and packed attention by one generation of FlashAttention; subclasses add the differences."""

    family: ClassVar[str | None] = "FLASH_ATTN"
    device_types: ClassVar[Sequence[str]] = ("cuda",)
    supported_dtypes: ClassVar[Sequence[object]] = ("float16", "bfloat16")
    features: ClassVar[Feature] = COMMON_FEATURES
    step_safe: ClassVar[bool] = True

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int]) -> bool:
        """As `attnplug.backends.libraries` says."""
        return serves_capability(cls.get_name(), capability)

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, spec: LayerSpec | None = None, device: Device | None = None
    ) -> Sequence[int | MultipleOf]:
        """The sizes that its kernels read; with chunks, divisors of the chunk, because a chunk begins at a page."""
        sizes = cls._page_sizes(spec, device)
        if spec is None or spec.chunk_size is None:
            return sizes
        chunk = spec.chunk_size
        # A backend must name a size; if none divides the chunk, supports_combination refuses the layer.
        return _dividing(chunk, sizes) or sizes

    @classmethod
    def _page_sizes(cls, spec: LayerSpec | None, device: Device | None) -> Sequence[int | MultipleOf]:
        """Page sizes that its kernels read, without regard to chunks."""
        raise NotImplementedError

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Refuse chunks that cannot become virtual requests over pages."""
        if spec.chunk_size is None:
            return None
        if spec.direct_kv or spec.attn_type is not AttentionType.DECODER:
            return "chunks are virtual requests over the pages of a decoder, and K and V come with the call"
        if not _dividing(spec.chunk_size, cls._page_sizes(spec, device)):
            return f"chunk_size={spec.chunk_size} is no multiple of a page size that its kernels read"
        return None

    @classmethod
    def get_builder_cls(cls) -> type[FlashAttnMetadataBuilder]:
        """FlashAttnMetadataBuilder."""
        from attnplug.backends.flash_attn.builder import FlashAttnMetadataBuilder

        return FlashAttnMetadataBuilder


def _dividing(chunk: int, sizes: Sequence[int | MultipleOf]) -> tuple[int, ...]:
    return tuple(size for size in range(1, chunk + 1) if chunk % size == 0 and MultipleOf.allows(sizes, size))
