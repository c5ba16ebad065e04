"""The three backends as they are, but with FlashAttention's kernels computed on the CPU."""

from __future__ import annotations

from typing import Any

from attnplug.backends.flash_attn import FlashAttn2Backend, FlashAttn3Backend, FlashAttn4Backend
from attnplug.core.blocks import MultipleOf


class FlashAttn2OnCpu(FlashAttn2Backend):
    device_types = ("cpu",)
    requires = ()

    @classmethod
    def get_impl_cls(cls) -> Any:
        from flash_attn_cpu_impls import Impl2

        return Impl2


class FlashAttn3OnCpu(FlashAttn3Backend):
    device_types = ("cpu",)
    requires = ()

    @classmethod
    def get_impl_cls(cls) -> Any:
        from flash_attn_cpu_impls import Impl3

        return Impl3


class FlashAttn4OnCpu(FlashAttn4Backend):
    device_types = ("cpu",)
    requires = ()

    @classmethod
    def get_impl_cls(cls) -> Any:
        from flash_attn_cpu_impls import Impl4

        return Impl4

    @classmethod
    def _page_sizes(cls, spec: Any, device: Any) -> Any:
        # A device without a capability has the tiles of all GPUs, and 128 is one of them for every layer.
        return super()._page_sizes(spec, device) if spec else (MultipleOf(16, but=(128,)),)

    @classmethod
    def compile_key(cls, spec: Any) -> None:
        return None
