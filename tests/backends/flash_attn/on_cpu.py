"""The three backends as they are, but with FlashAttention's kernels computed on the CPU."""

from __future__ import annotations

from typing import Any

import fake_libraries

from attnplug.backends.flash_attn import FlashAttn2Backend, FlashAttn3Backend, FlashAttn4Backend
from attnplug.backends.flash_attn.fa2 import FlashAttn2Impl, FlashAttn2Kernels
from attnplug.backends.flash_attn.fa3 import FlashAttn3Impl, FlashAttn3Kernels
from attnplug.backends.flash_attn.fa4 import FlashAttn4Impl, FlashAttn4Kernels


class Impl2(FlashAttn2Impl):
    @classmethod
    def kernels(cls) -> Any:
        return FlashAttn2Kernels(fake_libraries.varlen_fwd)


class Impl3(FlashAttn3Impl):
    @classmethod
    def kernels(cls) -> Any:
        return FlashAttn3Kernels(fake_libraries.fwd, fake_libraries.schedule)


class Impl4(FlashAttn4Impl):
    @classmethod
    def kernels(cls) -> Any:
        return FlashAttn4Kernels(fake_libraries._flash_attn_fwd)


class FlashAttn2OnCpu(FlashAttn2Backend):
    device_types = ("cpu",)
    requires = ()

    @classmethod
    def get_impl_cls(cls) -> Any:
        return Impl2


class FlashAttn3OnCpu(FlashAttn3Backend):
    device_types = ("cpu",)
    requires = ()

    @classmethod
    def get_impl_cls(cls) -> Any:
        return Impl3


class FlashAttn4OnCpu(FlashAttn4Backend):
    device_types = ("cpu",)
    requires = ()

    @classmethod
    def get_impl_cls(cls) -> Any:
        return Impl4

    @classmethod
    def compile_key(cls, spec: Any) -> None:
        return None
