"""A backend's module that is light, with a class that loads torch when it is asked what it can do."""

from __future__ import annotations

from attnplug.backends.torch_native import TorchBackend


class AsksTorch(TorchBackend):
    """Looks at the machine instead of declaring."""

    @staticmethod
    def get_name() -> str:
        return "ASKS_TORCH"

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        import torch

        return not torch.cuda.is_available() or head_size <= 256


class Raises(TorchBackend):
    """Can be imported, but not asked."""

    @staticmethod
    def get_name() -> str:
        return "RAISES_WHEN_ASKED"

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[str, ...]:
        raise OSError("no configuration file")
