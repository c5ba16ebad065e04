"""Returns an int from attnplug_backends."""

from __future__ import annotations

from attnplug import AttentionBackend, hookimpl
from attnplug.backends.torch_native import TorchBackend

ATTNPLUG_API = (1, 1)


class BadNotASequence(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    get_impl_cls = TorchBackend.get_impl_cls
    get_builder_cls = TorchBackend.get_builder_cls

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_NOT_A_SEQUENCE"


@hookimpl
def attnplug_backends() -> int:
    """How many backends there are, which nobody asked."""
    return len([BadNotASequence])
