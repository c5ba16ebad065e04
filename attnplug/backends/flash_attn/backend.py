"""The declarations of FLASH_ATTN_2, _3 and _4.

`attnplug.backends.libraries` has the versions and GPUs that each is used with. The priorities on compute capability
9.0 follow measurements on an H200 (bfloat16, 32 query heads over 8 of size 128). Paged prefill of 16k tokens ran at
645 TFLOP/s with FlashAttention 4, 600 with FlashInfer and 319 with FlashAttention 2. Decodes of 8 requests of 32k
tokens reached 99 % of a copy's bandwidth with FlashInfer and 56 % with FlashAttention 4. FlashAttention 3 was not
measured; its priority is between the other two. Below 9.0 FlashInfer prefills with its fa2 template. That took 0.92
to 1.11 of FlashAttention 2's time by head size, and needs a plan on the host: there FlashAttention 2 comes first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, ClassVar

from attnplug.backends.flash_attn.tiles import key_tiles, why_not_over_pages
from attnplug.backends.libraries import requirements_of, serves_capability
from attnplug.core.backend import AttentionBackend
from attnplug.core.blocks import MultipleOf
from attnplug.core.features import Feature
from attnplug.core.spec import AttentionType, Phase

if TYPE_CHECKING:
    from attnplug.backends.flash_attn.builder import FlashAttnMetadataBuilder
    from attnplug.backends.flash_attn.fa2 import FlashAttn2Impl
    from attnplug.backends.flash_attn.fa3 import FlashAttn3Impl
    from attnplug.backends.flash_attn.fa4 import FlashAttn4Impl
    from attnplug.core.device import Device
    from attnplug.core.spec import LayerSpec

_COMMON_FEATURES = (
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
    features: ClassVar[Feature] = _COMMON_FEATURES
    step_safe: ClassVar[bool] = True

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int]) -> bool:
        """As `attnplug.backends.libraries` says."""
        return serves_capability(cls.get_name(), capability)

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int | MultipleOf]:
        """8 to 256 in steps of 8."""
        return tuple(range(8, 257, 8))

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, spec: LayerSpec | None = None, device: Device | None = None
    ) -> Sequence[int | MultipleOf]:
        """The sizes that its kernels read; with chunks, divisors of the chunk, because a chunk begins at a page."""
        sizes = cls._page_sizes(spec, device)
        if spec is None or spec.chunk_size is None:
            return sizes
        # A backend must name a size; if none divides the chunk, supports_combination refuses the layer.
        return MultipleOf.dividing(spec.chunk_size, sizes) or sizes

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
            return "chunks need the pages of a decoder: they become virtual requests over them"
        if not MultipleOf.dividing(spec.chunk_size, cls._page_sizes(spec, device)):
            return f"chunk_size={spec.chunk_size} is not a multiple of a page size that its kernels read"
        return None

    @classmethod
    def get_builder_cls(cls) -> type[FlashAttnMetadataBuilder]:
        """FlashAttnMetadataBuilder."""
        from attnplug.backends.flash_attn.builder import FlashAttnMetadataBuilder

        return FlashAttnMetadataBuilder


class FlashAttn2Backend(FlashAttnBackend):
    """FlashAttention 2: the only generation with ALiBi, for GPUs before and after Hopper too."""

    requires: ClassVar[Sequence[str | tuple[str, ...]]] = requirements_of("FLASH_ATTN_2")
    features: ClassVar[Feature] = _COMMON_FEATURES | Feature.ALIBI
    # Its kernels for decodes of one token split the keys, and those for several do not.
    drafts_on_prefill: ClassVar[bool] = True

    @staticmethod
    def get_name() -> str:
        """The name, "FLASH_ATTN_2"."""
        return "FLASH_ATTN_2"

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """Prefill 230, decode 203, both 210; on 9.x prefill 205 and both 205, after FlashInfer."""
        is_hopper = device.capability is not None and device.capability[0] == 9
        prefill, both = (205, 205) if is_hopper else (230, 210)
        return {Phase.PREFILL: prefill, Phase.DECODE: 203, None: both}[phase]

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Refuse windows in cross attention, where a request may have more queries than keys."""
        if spec.attn_type is AttentionType.ENCODER_DECODER and spec.window != (-1, -1):
            # The kernels add the other limit at the longest request's length. A block of queries before the first
            # key is then possible, which `FilledRequests` in `fa2` cannot repair.
            return (
                f"window={spec.window} in cross attention: its kernels need at least as many keys as queries"
            )
        return super().supports_combination(spec, device)

    @classmethod
    def _page_sizes(cls, spec: LayerSpec | None, device: Device | None) -> Sequence[int | MultipleOf]:
        return (MultipleOf(256),)

    @classmethod
    def get_impl_cls(cls) -> type[FlashAttn2Impl]:
        """FlashAttn2Impl, once its library is imported."""
        from attnplug.backends.flash_attn.fa2 import FlashAttn2Impl

        FlashAttn2Impl.kernels()
        return FlashAttn2Impl


class FlashAttn3Backend(FlashAttnBackend):
    """FlashAttention 3, for Hopper. Its e4m3 kernels are not used: they need queries of e4m3 too."""

    requires: ClassVar[Sequence[str | tuple[str, ...]]] = requirements_of("FLASH_ATTN_3")
    features: ClassVar[Feature] = _COMMON_FEATURES | Feature.HEAD_SIZE_V

    @staticmethod
    def get_name() -> str:
        """The name, "FLASH_ATTN_3"."""
        return "FLASH_ATTN_3"

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """Prefill 215, decode 206, both 215: between the other two, and after FlashInfer."""
        return 206 if phase is Phase.DECODE else 215

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Refuse value heads of another size, except in the one pair that it is built for."""
        return _other_values(spec) or super().supports_combination(spec, device)

    @classmethod
    def _page_sizes(cls, spec: LayerSpec | None, device: Device | None) -> Sequence[int | MultipleOf]:
        # A page of whole key tiles (hopper/tile_size.h: 64, 80, 96, 112, 128, ...) is loaded with its unused
        # rows, which may be NaN.
        return (16, 32) if spec is not None and spec.head_size > 192 else (16, 32, 64)

    @classmethod
    def get_impl_cls(cls) -> type[FlashAttn3Impl]:
        """FlashAttn3Impl, once its library is imported."""
        from attnplug.backends.flash_attn.fa3 import FlashAttn3Impl

        FlashAttn3Impl.kernels()
        return FlashAttn3Impl


class FlashAttn4Backend(FlashAttnBackend):
    """FlashAttention 4, for Hopper and datacentre Blackwell: compiled at first use by the CuTe DSL."""

    requires: ClassVar[Sequence[str | tuple[str, ...]]] = requirements_of("FLASH_ATTN_4")
    features: ClassVar[Feature] = _COMMON_FEATURES | Feature.SINKS | Feature.HEAD_SIZE_V

    @staticmethod
    def get_name() -> str:
        """The name, "FLASH_ATTN_4"."""
        return "FLASH_ATTN_4"

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """Prefill 240, before all others; decode 210, after FlashInfer, because it does not split keys; both 225."""
        return {Phase.PREFILL: 240, Phase.DECODE: 210, None: 225}[phase]

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int | MultipleOf]:
        """16 to 256 in steps of 8; over pages and on Blackwell fewer, see `supports_combination`."""
        return tuple(range(16, 257, 8))

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Refuse head sizes that it cannot serve over pages or on Blackwell, and untuned value head sizes."""
        sizes = spec.head_size, spec.head_size_v
        blackwell = device.capability is not None and device.capability >= (10, 0)
        if blackwell and 128 < spec.head_size <= 256 and sizes not in ((192, 128), (256, 256)):
            return f"head_size={sizes[0]} on {device}: there it is at most 128, or 256, or 192 with values of 128"
        return (
            _other_values(spec)
            or why_not_over_pages(spec, device)
            or super().supports_combination(spec, device)
        )

    @classmethod
    def _page_sizes(cls, spec: LayerSpec | None, device: Device | None) -> Sequence[int | MultipleOf]:
        if spec is None:
            return (MultipleOf(16),)
        tiles = key_tiles(spec, device)
        return (MultipleOf(16, but=tuple(tile for tile in tiles if tile % 16 == 0)),)

    @classmethod
    def compile_key(cls, spec: LayerSpec) -> Hashable | None:
        """The values that the CuTe DSL compiles in; lengths, pages, scales and the width of a window are not."""
        left, right = spec.window
        return (
            spec.num_heads // spec.num_kv_heads,
            spec.head_size,
            spec.head_size_v,
            spec.dtype,
            spec.causal,
            spec.direct_kv,
            left >= 0,
            right > 0,
            spec.logits_soft_cap,
            spec.has_sinks,
            spec.needs_lse,
        )

    @classmethod
    def get_impl_cls(cls) -> type[FlashAttn4Impl]:
        """FlashAttn4Impl, once its library is imported."""
        from attnplug.backends.flash_attn.fa4 import FlashAttn4Impl

        FlashAttn4Impl.kernels()
        return FlashAttn4Impl


def _other_values(spec: LayerSpec) -> str | None:
    asked = Feature.HEAD_SIZE_V in spec.required_features()
    if not asked or (spec.head_size, spec.head_size_v) == (192, 128):
        return None
    return (
        f"head_size={spec.head_size} with head_size_v={spec.head_size_v}; values of another size are "
        f"served for head_size=192 and head_size_v=128 only"
    )
