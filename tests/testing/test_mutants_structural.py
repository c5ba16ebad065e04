"""Wrong backends of structure, state and declarations: the right check catches each, with words that help."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterator

import pytest
from catching import Wrong
from wrong_calls import WRONG_CALLS
from wrong_claims import WRONG_CLAIMS
from wrong_halves import WRONG_HALVES
from wrong_layers import WRONG_LAYERS
from wrong_plans import WRONG_PLANS

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import Device
from attnplug.testing.conformance.cases import Case, designed_cases
from attnplug.testing.conformance.check import Check, CheckSkipped
from attnplug.testing.conformance.correctness import check_case
from attnplug.testing.conformance.listing import conformance_checks
from attnplug.testing.conformance.target import Target

ALL = [
    wrong
    for wrong in (*WRONG_CALLS, *WRONG_CLAIMS, *WRONG_HALVES, *WRONG_LAYERS, *WRONG_PLANS)
    if wrong.check != "*"
]


@functools.cache
def torch_cases() -> list[Case]:
    """The numeric cases of TORCH, whose declarations the wrong backends share."""
    return designed_cases(Target(TorchBackend, Device("cpu")))


def numeric_checks(wrong: Wrong) -> Iterator[Check]:
    target = Target(wrong.backend, Device("cpu"))
    cases = [case for case in torch_cases() if fnmatch.fnmatchcase(f"correct/{case.id}", wrong.check)]
    assert cases
    for case in cases[:8]:
        yield Check.of(case.id, "", check_case, target, case)


def named_checks(wrong: Wrong) -> Iterator[Check]:
    for check in conformance_checks(wrong.backend, device="cpu", only=[wrong.check]):
        if fnmatch.fnmatchcase(check.id, wrong.check):
            yield check


def problem_of(check: Check) -> str | None:
    try:
        check()
    except CheckSkipped:
        return None
    except Exception as problem:
        return str(problem)
    return None


NUMERIC = [wrong for wrong in ALL if wrong.check.startswith("correct/")]


@pytest.mark.parametrize("wrong", NUMERIC, ids=lambda wrong: wrong.name)
def test_a_numeric_case_catches_it_with_words_that_point_at_the_mistake(wrong: Wrong) -> None:
    assert any(wrong.says in (problem_of(check) or "right") for check in numeric_checks(wrong))


OTHERS = [wrong for wrong in ALL if wrong not in NUMERIC]


@pytest.mark.parametrize("wrong", OTHERS, ids=lambda wrong: wrong.name)
def test_the_right_check_catches_it_with_words_that_point_at_the_mistake(wrong: Wrong) -> None:
    checks = list(named_checks(wrong))
    assert checks
    problems = [problem_of(check) for check in checks]
    assert all(problem and wrong.says in problem for problem in problems), problems


def test_the_names_of_wrong_backends_are_unique() -> None:
    names = [wrong.name for wrong in ALL]
    assert len(set(names)) == len(names)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ALL, ids=lambda wrong: wrong.name)
def test_the_whole_kit_catches_it(wrong: Wrong) -> None:
    listed = conformance_checks(wrong.backend, device="cpu")
    assert any(problem_of(check) for check in listed if not check.id.startswith("declaration/light"))
