"""The three impls as they are, on the entry points of `flash_attn_fakes`."""

from __future__ import annotations

from typing import Any

import flash_attn_fakes
from flash_attn_2_fakes import fwd_kvcache, varlen_fwd

from attnplug.backends.flash_attn.fa2 import FlashAttn2Impl, FlashAttn2Kernels
from attnplug.backends.flash_attn.fa3 import FlashAttn3Impl, FlashAttn3Kernels
from attnplug.backends.flash_attn.fa4 import FlashAttn4Impl, FlashAttn4Kernels


class Impl2(FlashAttn2Impl):
    @classmethod
    def kernels(cls) -> Any:
        return FlashAttn2Kernels(varlen_fwd, fwd_kvcache)


class Impl3(FlashAttn3Impl):
    @classmethod
    def kernels(cls) -> Any:
        return FlashAttn3Kernels(flash_attn_fakes.fwd, flash_attn_fakes.schedule)


class Impl4(FlashAttn4Impl):
    @classmethod
    def kernels(cls) -> Any:
        return FlashAttn4Kernels(flash_attn_fakes._flash_attn_fwd)
