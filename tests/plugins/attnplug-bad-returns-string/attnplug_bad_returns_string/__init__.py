"""Answers with one string where a list of reasons is due."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug import AttentionBackend, hookimpl
from attnplug.backends.torch_native import TorchBackend

if TYPE_CHECKING:
    from attnplug import Device, LayerSpec, Phase

ATTNPLUG_API = (1, 1)


class BadReturnsString(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = ("float16", "bfloat16", "float32")
    get_impl_cls = TorchBackend.get_impl_cls
    get_builder_cls = TorchBackend.get_builder_cls

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_RETURNS_STRING"

    @classmethod
    def validate_configuration(cls, spec: LayerSpec, device: Device, phase: Phase | None = None) -> str:
        """Refuses every layer, in the wrong shape."""
        return "layer not supported on Tuesdays"


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_RETURNS_STRING."""
    return [BadReturnsString]
