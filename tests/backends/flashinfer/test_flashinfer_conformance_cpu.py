"""FLASHINFER passes the conformance kit over a FlashInfer in torch, which attends by what it was planned with."""

from __future__ import annotations

import pytest
from flashinfer_on_cpu import FlashInferFa3OnCpu, FlashInferOnCpu
from slow_kits import slow_kit

from attnplug.backends.flashinfer import planned_wrapper

pytestmark = pytest.mark.usefixtures("fake_library")


@pytest.fixture(autouse=True)
def _only_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    # To fill 128 MiB for each builder takes most of the time, and workspaces of the computed need may not be too small.
    monkeypatch.setattr(planned_wrapper, "_LEAST", 1 << 20)


@slow_kit(FlashInferOnCpu, device="cpu")
def test_fa2(check):
    check()


@pytest.mark.slow
@slow_kit(FlashInferFa3OnCpu, device="cpu")
def test_fa3(check):
    check()
