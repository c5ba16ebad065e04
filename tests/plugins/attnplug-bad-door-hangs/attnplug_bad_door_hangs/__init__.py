"""Never comes back when its impl is asked for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from attnplug import AttentionBackend, hookimpl
from attnplug.backends.torch_native import TorchBackend

if TYPE_CHECKING:
    from attnplug.core.impl import AttentionImpl

ATTNPLUG_API = (1, 1)


class BadDoorHangs(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    get_builder_cls = TorchBackend.get_builder_cls

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_DOOR_HANGS"

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl[Any]]:
        """Waits for ever, as a library does that compiles under a lock left behind."""
        while True:
            time.sleep(3600)


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_DOOR_HANGS."""
    return [BadDoorHangs]
