"""The three impls as they are, on the entry points of `fake_libraries`."""

from __future__ import annotations

from typing import Any

import fake_libraries

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
