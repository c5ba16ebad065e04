"""FLASH_MLA passes the conformance kit over a FlashMLA in torch."""

from __future__ import annotations

import pytest
from flash_mla_on_cpu import FlashMLAOnCpu
from slow_kits import slow_kit

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fake_flash_mla")]


@slow_kit(FlashMLAOnCpu, device="cpu")
def test_on_a_cpu(check):
    check()
