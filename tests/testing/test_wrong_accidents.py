"""Each accident of a ported kernel fails the check that looks at it, and the message has the words that point there."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools

import pytest
from wrong_accidents import ACCIDENTS, Accident
from wrong_crossings import WRONG_CROSSINGS
from wrong_sizes import WRONG_SIZES

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import Device
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError
from attnplug.testing.conformance.listing import conformance_checks
from attnplug.testing.conformance.target import Target


@functools.cache
def checks_of_torch() -> dict[str, Check]:
    """TORCH's checks by id; a variant with the same declarations has the same ones."""
    return {check.id: check for check in conformance_checks(TorchBackend, device=Device("cpu"))}


def bound(check: Check, accident: Accident) -> functools.partial[None]:
    """The check, of the wrong backend."""
    run = check.run
    assert isinstance(run, functools.partial)
    given = (
        dataclasses.replace(each, backend=accident.backend) if isinstance(each, Target) else each
        for each in run.args
    )
    return functools.partial(run.func, *given, **run.keywords)


@pytest.mark.parametrize(
    "accident", [*ACCIDENTS, *WRONG_SIZES, *WRONG_CROSSINGS], ids=lambda accident: accident.name
)
def test_accidents_are_caught_in_words(accident: Accident) -> None:
    checks = checks_of_torch()
    ids = fnmatch.filter(checks, accident.check)
    assert ids, f"no check is called {accident.check}"
    problems = (failure(bound(checks[name], accident)) for name in ids)
    problem = next((each for each in problems if each is not None), None)
    assert problem is not None, "the kit finds nothing wrong"
    assert accident.says in str(problem)


def failure(check: functools.partial[None]) -> ConformanceError | None:
    """What the check raises."""
    try:
        check()
    except CheckSkipped:
        return None
    except ConformanceError as problem:
        return problem
    return None
