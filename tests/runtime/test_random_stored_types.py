"""Selection, plan and runtime give one answer for any name of a stored type, and for any mix of them."""

from __future__ import annotations

import pytest
import random_stored_types as stored
from served_model import ServedModel


def expect_agreement(seeds: range) -> None:
    found = stored.run(seeds, stored.registry_of_all())
    assert found.disagree == {}
    assert found.served > len(seeds) // 5
    assert found.steps
    assert found.refused["selection and plan"] > len(seeds) // 5


def test_random_names() -> None:
    expect_agreement(range(60))


@pytest.mark.slow
def test_more_random_names() -> None:
    expect_agreement(range(60, 1000))


def test_a_plan_that_takes_less_than_selection_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: object, **options: object) -> None:
        raise stored.SpecError("dtype", "nvfp4", "has no known element size")

    monkeypatch.setattr(stored, "plan", refuses)
    found = stored.run(range(10), stored.registry_of_all())
    assert any("no known element size" in each for each in found.disagree.values())


def test_wrong_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: ServedModel, **tokens: int) -> None:
        raise AssertionError("output[0, 0, 0]: 1 is not 2")

    monkeypatch.setattr(ServedModel, "step", wrong)
    found = stored.run(range(0, 60, 6), stored.registry_of_all())
    assert any("1 is not 2" in each for each in found.disagree.values())
