"""A backend's module that loads torch when it is imported, not when it is used."""

from __future__ import annotations

import torch

from attnplug.backends.torch_native import TorchBackend


class ImportsTorch(TorchBackend):
    """Has what a backend may have, but at the wrong time."""

    supported_dtypes = (torch.float32, torch.bfloat16)

    @staticmethod
    def get_name() -> str:
        return "IMPORTS_TORCH"
