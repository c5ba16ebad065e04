"""Random schedules of a runtime equal one run of each request, and pages of other requests do not change."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES
from state_serving import schedule


@pytest.mark.parametrize("family", FAMILIES)
def test_random_schedules_in_float64_equal_one_run(family: str) -> None:
    for seed in range(40):
        assert schedule(family, seed) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_random_schedules_in_float32_are_as_close_as_float32(family: str) -> None:
    for seed in range(5):
        assert schedule(family, seed, dtype=torch.float32) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_thousand_random_schedules_equal_one_run(family: str) -> None:
    for seed in range(1000, 2000):
        assert schedule(family, seed) < 1e-12
