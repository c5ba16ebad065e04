"""Claims attention sinks, and leaves them out of the softmax; all else is as it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attnplug import AttentionBackend, Device, Feature, LayerSpec, hookimpl
from attnplug.backends.torch_native import TorchBackend

if TYPE_CHECKING:
    from attnplug.core import MultipleOf
    from attnplug.core.impl import AttentionImpl

ATTNPLUG_API = (1, 1)


class BadLiar(AttentionBackend):
    """Serves windows as it should, and sinks as if there were none."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float32", "bfloat16")
    get_builder_cls = TorchBackend.get_builder_cls
    features = Feature.SLIDING_WINDOW | Feature.SINKS

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_LIAR"

    @classmethod
    def get_supported_head_sizes(cls) -> Sequence[int | MultipleOf]:
        """Few, so that trying all of it takes seconds."""
        return (64,)

    @classmethod
    def get_supported_kernel_block_sizes(
        cls, spec: LayerSpec | None = None, device: Device | None = None
    ) -> Sequence[int | MultipleOf]:
        """Likewise."""
        return (16,)

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl[Any]]:
        """The impl of TORCH, which is told of no sinks."""
        from attnplug_bad_liar.impl import BadLiarImpl

        return BadLiarImpl


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_LIAR."""
    return [BadLiar]
