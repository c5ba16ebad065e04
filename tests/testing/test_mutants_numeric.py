"""The kit catches each numeric mutant by a check that asks for what it gets wrong, and finds no fault in the reference."""

from __future__ import annotations

import fnmatch

import mutants.masks
import mutants.sinks
import mutants.sizes
import mutants.softmax
import mutants.steps
import mutants.storage  # noqa: F401 - each import lists its mutants
import pytest
from mutants.declared import ReferenceBackend
from mutants.making import MUTANTS, Mutant
from mutants.running import checks_of_reference, failures_of

from attnplug.testing.conformance import ConformanceError

# Large batches take most of the time, and packed cases come after many others.
LARGE = ("correct/long-", "correct/many-", "correct/far-", "correct/*-", "builder/common-prefix-")


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.check.startswith(LARGE) else [])
        for each in MUTANTS
    ],
)
def test_the_named_check_catches_the_mutant(mutant: Mutant) -> None:
    asked = [check for check in checks_of_reference() if fnmatch.fnmatch(check.id, mutant.check)]
    assert asked, f"no check is called {mutant.check}"
    _, problem = next(failures_of(mutant.backend, asked), (None, None))
    assert isinstance(problem, ConformanceError), problem
    assert mutant.says in str(problem)


def test_the_reference_passes_some_checks() -> None:
    assert list(failures_of(ReferenceBackend, checks_of_reference()[::40])) == []


@pytest.mark.slow
@pytest.mark.rare
def test_the_reference_passes_all_checks() -> None:
    assert list(failures_of(ReferenceBackend, checks_of_reference())) == []


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_whole_kit_catches_the_mutant(mutant: Mutant) -> None:
    # Checks of answers come first: they are the likeliest to fail.
    checks = sorted(checks_of_reference(), key=lambda check: not check.id.startswith("correct/"))
    assert any(failures_of(mutant.backend, checks))


def test_mutants_have_names_of_their_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 90
