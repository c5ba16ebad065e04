"""Imports torch when it is imported."""

from __future__ import annotations

import torch

from attnplug import AttentionBackend, hookimpl
from attnplug.backends.torch_native import TorchBackend

ATTNPLUG_API = (1, 1)


class BadImportsTorch(AttentionBackend):
    """Would serve everything plain, on any device."""

    device_types = ("cpu", "cuda")
    supported_dtypes = (torch.float16, torch.bfloat16, torch.float32)
    get_impl_cls = TorchBackend.get_impl_cls
    get_builder_cls = TorchBackend.get_builder_cls

    @staticmethod
    def get_name() -> str:
        """Its name."""
        return "BAD_IMPORTS_TORCH"


@hookimpl
def attnplug_backends() -> list[type[AttentionBackend]]:
    """Offers BAD_IMPORTS_TORCH."""
    return [BadImportsTorch]
