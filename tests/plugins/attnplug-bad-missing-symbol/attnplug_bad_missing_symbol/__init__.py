"""Imports a symbol that does not exist when its impl is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug import AttentionBackend, hookimpl
from attnplug.backends.torch_native import TorchBackend

if TYPE_CHECKING:
    from attnplug.core.impl import AttentionImpl

ATTNPLUG_API = (1, 1)


class BadMissingSymbol(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    get_builder_cls = TorchBackend.get_builder_cls

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_MISSING_SYMBOL"

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl[Any]]:
        """Asks torch for a symbol that it does not have, as after an upgrade."""
        from torch.nn.attention import acme_varlen_attention

        return acme_varlen_attention


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_MISSING_SYMBOL."""
    return [BadMissingSymbol]
