"""Answers with one string where a list of reasons is due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug import AttentionBackend, hookimpl

if TYPE_CHECKING:
    from attnplug import Device, LayerSpec, Phase
    from attnplug.core.impl import AttentionImpl
    from attnplug.core.metadata import AttentionMetadataBuilder

ATTNPLUG_API = (1, 1)


class BadReturnsString(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_RETURNS_STRING"

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
    def validate_configuration(cls, spec: LayerSpec, device: Device, phase: Phase | None = None) -> str:
        """Refuses every layer, in the wrong shape."""
        return "layer not supported on Tuesdays"


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_RETURNS_STRING."""
    return [BadReturnsString]
