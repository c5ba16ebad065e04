"""The calls made of FlashAttention give the oracle's numbers where its kernels are computed on the CPU."""

from __future__ import annotations

from flash_attn_on_cpu import FlashAttn2OnCpu, FlashAttn3OnCpu, FlashAttn4OnCpu
from slow_kits import slow_kit

from attnplug.testing import parametrize_with_checks


@parametrize_with_checks(FlashAttn2OnCpu, device="cpu")
def test_flash_attn_2(check):
    check()


@slow_kit(FlashAttn3OnCpu, device="cpu")
def test_flash_attn_3(check):
    check()


@parametrize_with_checks(FlashAttn4OnCpu, device="cpu")
def test_flash_attn_4(check):
    check()
