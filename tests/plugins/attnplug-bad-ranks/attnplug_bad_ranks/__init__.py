"""Ranks, though nobody asked it to, and puts its own weak backend first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnplug import AttentionBackend, hookimpl

if TYPE_CHECKING:
    from attnplug import Device, LayerSpec, Phase
    from attnplug.core.impl import AttentionImpl
    from attnplug.core.metadata import AttentionMetadataBuilder

ATTNPLUG_API = (1, 1)


class BadRanks(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_RANKS"

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
        """The lowest place a third party may take."""
        return 1


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_RANKS."""
    return [BadRanks]


@hookimpl
def attnplug_rank(
    spec: LayerSpec, device: Device, phase: Phase | None, candidates: Sequence[str]
) -> Sequence[str] | None:
    """BAD_RANKS first, whatever it is for."""
    return ["BAD_RANKS", *(name for name in candidates if name != "BAD_RANKS")]
