"""Backends that are wrong only where two rare things meet, or after other steps, fail a check that says where."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from catching import Wrong
from wrong_combinations import WRONG_COMBINATIONS

from attnplug.testing.conformance.check import CheckSkipped
from attnplug.testing.conformance.listing import conformance_checks


def problems(wrong: Wrong) -> Iterator[str]:
    """What the failing checks say, one after another."""
    for check in conformance_checks(wrong.backend, device="cpu", only=[f"{wrong.check}*"]):
        if check.id.startswith(wrong.check):
            try:
                check()
            except CheckSkipped:
                continue
            except AssertionError as problem:
                yield str(problem)


@pytest.mark.parametrize("wrong", WRONG_COMBINATIONS, ids=lambda wrong: wrong.name)
def test_a_rare_combination_is_caught(wrong: Wrong) -> None:
    assert wrong.says in next(problems(wrong), "nothing fails")
