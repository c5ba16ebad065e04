"""FLASHINFER's decode on latents passes the conformance kit over a FlashInfer in torch."""

from __future__ import annotations

import pytest
from slow_kits import slow_kit
from test_flashinfer_latent import LatentOnCpu

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fake_library")]


@pytest.fixture
def fake_version() -> str:
    return "0.6.13"


@slow_kit(LatentOnCpu, device="cpu")
def test_on_a_cpu(check):
    check()
