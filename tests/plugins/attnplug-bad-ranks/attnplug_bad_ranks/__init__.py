"""Ranks, though nobody asked it to, and puts its own weak backend first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attnplug import AttentionBackend, hookimpl
from attnplug.backends.torch_native import TorchBackend

if TYPE_CHECKING:
    from attnplug import Device, LayerSpec, Phase

ATTNPLUG_API = (1, 1)


class BadRanks(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    get_impl_cls = TorchBackend.get_impl_cls
    get_builder_cls = TorchBackend.get_builder_cls

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_RANKS"

    @classmethod
    def get_priority(cls, spec: LayerSpec, device: Device, phase: Phase | None) -> int:
        """The lowest place a third party may take."""
        return 1


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_RANKS."""
    return [BadRanks]


@hookimpl
def attnplug_rank(
    spec: LayerSpec, device: Device, phase: Phase | None, candidates: Sequence[str]
) -> Sequence[str] | None:
    """BAD_RANKS first, whatever it is for."""
    return ["BAD_RANKS", *(name for name in candidates if name != "BAD_RANKS")]
