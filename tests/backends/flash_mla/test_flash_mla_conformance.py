"""FLASH_MLA passes the conformance kit over a FlashMLA in torch."""

from __future__ import annotations

import pytest
from flash_mla_on_cpu import FlashMLAOnCpu

from attnplug.testing import parametrize_with_checks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fake_flash_mla")]


@parametrize_with_checks(FlashMLAOnCpu, device="cpu")
def test_on_a_cpu(check):
    check()
