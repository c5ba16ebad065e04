"""Misspells its hook: attnplug_backend, without the s."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug import AttentionBackend, hookimpl

if TYPE_CHECKING:
    from attnplug.core.impl import AttentionImpl
    from attnplug.core.metadata import AttentionMetadataBuilder

ATTNPLUG_API = (1, 1)


class BadMisspelt(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_MISSPELT"

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
def attnplug_backend() -> list[type[AttentionBackend]]:
    """Offers BAD_MISSPELT to nobody."""
    return [BadMisspelt]
