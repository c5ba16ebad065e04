"""Never comes back from being imported."""

from __future__ import annotations

import time

from attnplug import AttentionBackend, hookimpl
from attnplug.backends.torch_native import TorchBackend

time.sleep(3600)

ATTNPLUG_API = (1, 1)


class BadHang(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    get_impl_cls = TorchBackend.get_impl_cls
    get_builder_cls = TorchBackend.get_builder_cls

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_HANG"


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_HANG."""
    return [BadHang]
