"""The declaration of FLASHINFER for latent attention: decodes on the latents, on NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

from attnplug.backends.flashinfer.options import too_small_scale
from attnplug.backends.libraries import serves_capability
from attnplug.core.mla.backend import MLADecodeBackend, QueryLens
from attnplug.core.spec import LayerSpec, Phase

if TYPE_CHECKING:
    from attnplug.backends.flashinfer.latent import FlashInferMLABuilder, FlashInferMLAImpl
    from attnplug.core.device import Device

_NAME = "FLASHINFER"
_MOST_HEADS = 128
_SMALL = ((8, 6), (8, 9))
"""GPUs whose multiprocessors have 100 KiB of shared memory, like those of 12.x."""


class FlashInferMLABackend(MLADecodeBackend):
    """FlashInfer's BatchMLAPagedAttentionWrapper: template fa3 on compute capability 9.x, fa2 on others.

    Prefills run on another backend. Versions before 0.6.13 are not known, and 0.7 allocates memory in each plan.
    """

    requires: ClassVar[Sequence[str | tuple[str, ...]]] = ("flashinfer-python>=0.6.13,<0.7",)
    device_types: ClassVar[Sequence[str]] = ("cuda",)
    supported_dtypes: ClassVar[Sequence[object]] = ("float16", "bfloat16")
    step_safe: ClassVar[bool] = True

    latent_sizes: ClassVar[Sequence[tuple[int, int]]] = ((512, 64),)
    query_lens: ClassVar[QueryLens | str] = QueryLens.ANY
    decode_threshold: ClassVar[int] = 8

    @staticmethod
    def get_name() -> str:
        """The name, "FLASHINFER"."""
        return _NAME

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """90, after TRITON: on compute capability 9.0 decodes of 16 to 128 heads take 1.12 to 1.00 of its time."""
        return 90

    @classmethod
    def padded_heads(cls, num_heads: int) -> int:
        """The next power of two."""
        # Tiles have 64 or 128 rows of queries and heads. If one ends within the heads of a query
        # that is not the last of its request, FlashInfer 0.6 can leave out that query's last key.
        return 1 << (num_heads - 1).bit_length()

    @classmethod
    def supports_compute_capability(cls, capability: tuple[int, int]) -> bool:
        """As `attnplug.backends.libraries` says."""
        return serves_capability(_NAME, capability)

    @classmethod
    def supports_combination(cls, spec: LayerSpec, device: Device) -> str | None:
        """Refuse other sizes, a scale too small for the mask, more heads than a tile has, and GPUs where fa2 gives zeros."""
        if spec.mla is not None and spec.num_heads > _MOST_HEADS:
            return f"num_heads={spec.num_heads} is more than {_MOST_HEADS}, the rows of a tile"
        found = device.capability
        if found is not None and (found in _SMALL or found[0] == 12):
            capability = "{}.{}".format(*found)
            return (
                f"FlashInfer's fa2 kernel gives zeros for scattered pages on compute capability {capability}"
            )
        return too_small_scale(spec) or super().supports_combination(spec, device)

    @classmethod
    def compile_key(cls, spec: LayerSpec) -> Hashable | None:
        """FlashInfer compiles a module for each dtype; also the key of the prefill half."""
        if spec.mla is None:
            return None
        return (spec.dtype, super().compile_key(spec))

    @classmethod
    def watch_compiling(cls) -> AbstractContextManager[list[str]]:
        """Inside, the list grows by the name of each FlashInfer module that is compiled or loaded."""
        from attnplug.backends.flashinfer.compiling import watch_compiling

        return watch_compiling()

    @classmethod
    def get_impl_cls(cls) -> type[FlashInferMLAImpl]:
        """FlashInferMLAImpl; BackendUnavailableError, with a remedy, if FlashInfer cannot be used here."""
        from attnplug.backends.flashinfer.latent import FlashInferMLAImpl
        from attnplug.backends.flashinfer.library import library

        library()
        return FlashInferMLAImpl

    @classmethod
    def get_builder_cls(cls) -> type[FlashInferMLABuilder]:
        """FlashInferMLABuilder; BackendUnavailableError as for the impl."""
        from attnplug.backends.flashinfer.latent import FlashInferMLABuilder
        from attnplug.backends.flashinfer.library import library

        library()
        return FlashInferMLABuilder
