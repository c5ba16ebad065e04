"""Has a hook that asks for an argument which attnplug does not pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnplug import AttentionBackend, hookimpl

if TYPE_CHECKING:
    from attnplug import Device, LayerSpec, Phase
    from attnplug.core.impl import AttentionImpl
    from attnplug.core.metadata import AttentionMetadataBuilder

ATTNPLUG_API = (1, 1)


class BadFutureHook(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_FUTURE_HOOK"

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


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_FUTURE_HOOK."""
    return [BadFutureHook]


@hookimpl
def attnplug_rank(
    spec: LayerSpec, device: Device, phase: Phase | None, candidates: Sequence[str], budget: int
) -> Sequence[str] | None:
    """Leaves the order alone; `budget` is the argument of a release to come."""
    return None
