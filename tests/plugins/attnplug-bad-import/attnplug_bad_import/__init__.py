"""Raises ImportError when it is imported."""

from __future__ import annotations

from attnplug import AttentionBackend, hookimpl
from attnplug.backends.torch_native import TorchBackend

raise ImportError("libacme.so.1: cannot open shared object file: No such file or directory")

ATTNPLUG_API = (1, 1)


class BadImport(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    get_impl_cls = TorchBackend.get_impl_cls
    get_builder_cls = TorchBackend.get_builder_cls

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_IMPORT"


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_IMPORT."""
    return [BadImport]
