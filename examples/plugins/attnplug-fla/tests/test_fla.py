"""The kit on the recurrent kernels of the delta rule, which Triton interprets without a GPU."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("fla")

from attnplug.core import Device
from attnplug.testing.conformance.check import Check
from attnplug.testing.conformance.states import state_checks
from attnplug.testing.conformance.target import Target

from attnplug_fla import FlaStates

# simple_gla is autotuned, which needs a GPU.
CHECKS = [each for each in state_checks.checks(Target(FlaStates, Device("cpu"))) if "-delta-" in each.id]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_the_kit_passes(check: Check) -> None:
    check()
