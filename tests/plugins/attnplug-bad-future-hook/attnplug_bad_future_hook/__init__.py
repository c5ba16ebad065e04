"""Has a hook that asks for an argument which attnplug does not pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnplug import AttentionBackend, hookimpl
from attnplug.backends.torch_native import TorchBackend

if TYPE_CHECKING:
    from attnplug import Device, LayerSpec, Phase

ATTNPLUG_API = (1, 1)


class BadFutureHook(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    get_impl_cls = TorchBackend.get_impl_cls
    get_builder_cls = TorchBackend.get_builder_cls

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_FUTURE_HOOK"


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_FUTURE_HOOK."""
    return [BadFutureHook]


@hookimpl
def attnplug_rank(
    spec: LayerSpec, device: Device, phase: Phase | None, candidates: Sequence[str], budget: int
) -> Sequence[str] | None:
    """Leaves the order alone; `budget` is the argument of a release to come."""
    return None
