"""FLASHINFER as it is, but on a CPU, where only the FlashInfer of these tests runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attnplug.backends.flashinfer import FlashInferBackend
from attnplug.backends.flashinfer.options import Options
from attnplug.core.features import Feature

if TYPE_CHECKING:
    from attnplug.backends.flashinfer.builder import FlashInferMetadataBuilder
    from attnplug.backends.flashinfer.impl import FlashInferImpl


@dataclasses.dataclass(frozen=True, slots=True)
class Fa3Options(Options):
    """Prefill on fa3, unless the user says otherwise."""

    prefill_backend: Literal["auto", "fa2", "fa3"] = "fa3"


class FlashInferOnCpu(FlashInferBackend):
    """Imports nothing of the library before a builder is made."""

    requires: ClassVar[Sequence[str | tuple[str, ...]]] = ()
    device_types: ClassVar[Sequence[str]] = ("cpu",)

    @classmethod
    def get_impl_cls(cls) -> type[FlashInferImpl]:
        from attnplug.backends.flashinfer.impl import FlashInferImpl

        return FlashInferImpl

    @classmethod
    def get_builder_cls(cls) -> type[FlashInferMetadataBuilder]:
        from flashinfer_replayed import ReplayedBuilder

        return ReplayedBuilder


class FlashInferFa3OnCpu(FlashInferOnCpu):
    """With fa3, which has no fp8 KV."""

    Options: ClassVar[type[Any] | None] = Fa3Options
    supported_kv_cache_dtypes: ClassVar[Sequence[str]] = ("auto",)
    features: ClassVar[Feature] = FlashInferBackend.features & ~Feature.FP8_KV
