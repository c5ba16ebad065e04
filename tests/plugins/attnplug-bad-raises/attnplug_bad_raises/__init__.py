"""Raises when it is asked whether it serves a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug import AttentionBackend, hookimpl
from attnplug.backends.torch_native import TorchBackend

if TYPE_CHECKING:
    from attnplug import Device, LayerSpec, Phase, Reason

ATTNPLUG_API = (1, 1)


class BadRaises(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    get_impl_cls = TorchBackend.get_impl_cls
    get_builder_cls = TorchBackend.get_builder_cls

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_RAISES"

    @classmethod
    def validate_configuration(
        cls, spec: LayerSpec, device: Device, phase: Phase | None = None
    ) -> list[Reason]:
        """Fails instead of answering."""
        raise RuntimeError("acme: no licence for this device")


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_RAISES."""
    return [BadRaises]
