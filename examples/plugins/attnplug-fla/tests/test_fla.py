"""The kit on the recurrent kernels of the delta rule, which Triton interprets without a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("fla")

from attnplug.testing import conformance_checks

from attnplug_fla import FlaStates

# simple_gla is autotuned, which needs a GPU.
CHECKS = [
    each
    for each in conformance_checks(FlaStates, device="cpu", only=["states/*"])
    if each.id.startswith("states/") and "-delta-" in each.id
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_the_kit_passes(check: Any) -> None:
    check()
