"""Ends the process, and calls that a success, when it is imported."""

from __future__ import annotations

import sys

from attnplug import AttentionBackend, hookimpl
from attnplug.backends.torch_native import TorchBackend

sys.exit(0)

ATTNPLUG_API = (1, 1)


class BadExit(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    get_impl_cls = TorchBackend.get_impl_cls
    get_builder_cls = TorchBackend.get_builder_cls

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_EXIT"


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_EXIT."""
    return [BadExit]
