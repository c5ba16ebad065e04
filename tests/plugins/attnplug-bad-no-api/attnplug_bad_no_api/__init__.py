"""Does not say which plugin API it was written for."""

from __future__ import annotations

from attnplug import AttentionBackend, hookimpl
from attnplug.backends.torch_native import TorchBackend


class BadNoApi(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    get_impl_cls = TorchBackend.get_impl_cls
    get_builder_cls = TorchBackend.get_builder_cls

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_NO_API"


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_NO_API."""
    return [BadNoApi]
