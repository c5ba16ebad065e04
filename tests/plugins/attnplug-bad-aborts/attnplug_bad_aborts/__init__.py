"""Kills the process when its impl is asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from attnplug import AttentionBackend, hookimpl
from attnplug.backends.torch_native import TorchBackend

if TYPE_CHECKING:
    from attnplug.core.impl import AttentionImpl

ATTNPLUG_API = (1, 1)


class BadAborts(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    get_builder_cls = TorchBackend.get_builder_cls

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_ABORTS"

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl[Any]]:
        """Kills the process, as a library does that finds its CUDA runtime broken."""
        os.abort()


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_ABORTS."""
    return [BadAborts]
