"""Returns a class that is no AttentionBackend."""

from __future__ import annotations

from attnplug import hookimpl
from attnplug.backends.torch_native import TorchBackend

ATTNPLUG_API = (1, 1)


class BadNotABackend:
    """Looks like a backend and is none: it inherits no contract."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    get_impl_cls = TorchBackend.get_impl_cls
    get_builder_cls = TorchBackend.get_builder_cls

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_NOT_A_BACKEND"


@hookimpl
def attnplug_backends() -> list[type]:
    """Offers BAD_NOT_A_BACKEND."""
    return [BadNotABackend]
