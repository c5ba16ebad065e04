"""Hangs, crashes, hogs memory or prints while it runs, each for one feature of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug import AttentionBackend, Feature, hookimpl
from attnplug.backends.torch_native import TorchBackend

if TYPE_CHECKING:
    from attnplug.core.impl import AttentionImpl

ATTNPLUG_API = (1, 1)


class BadKernels(AttentionBackend):
    """Serves plain layers as it should, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float32", "float16", "bfloat16")
    get_builder_cls = TorchBackend.get_builder_cls
    features = (
        Feature.SLIDING_WINDOW
        | Feature.CHUNKED_LOCAL
        | Feature.SOFT_CAP
        | Feature.SINKS
        | Feature.ALIBI
        | Feature.LSE
        | Feature.HEAD_SIZE_V
        | Feature.NON_CAUSAL
        | Feature.DIRECT_KV
    )

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_KERNELS"

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl[Any]]:
        """The impl of TORCH, but for what each feature brings."""
        from attnplug_bad_kernels.impl import BadKernelsImpl

        return BadKernelsImpl


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_KERNELS."""
    return [BadKernels]
