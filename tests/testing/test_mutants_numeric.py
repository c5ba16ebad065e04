"""The kit catches each numeric mutant by a check that asks for what it gets wrong, and finds no fault in the reference."""

from __future__ import annotations

import fnmatch
import functools

import mutants.accidents
import mutants.accidents_of_features
import mutants.accidents_of_state
import mutants.combinations
import mutants.crossings
import mutants.inputs
import mutants.latents
import mutants.masks
import mutants.ranges
import mutants.sinks
import mutants.sizes
import mutants.small_sizes
import mutants.softmax
import mutants.steps
import mutants.storage
import mutants.values
import mutants.views  # noqa: F401 - each import lists its mutants
import pytest
from mutants.declared import ReferenceBackend
from mutants.running import checks_of_reference, failures_of, failures_of_torch, named_checks, problem_of
from mutants.table import Mutant, mutants_of

from attnplug.core import Device
from attnplug.testing.conformance import ConformanceError
from attnplug.testing.conformance.builders import builders
from attnplug.testing.conformance.cases.designed_cases import designed_cases
from attnplug.testing.conformance.numbers.correctness import check_case
from attnplug.testing.conformance.serving import context_parallel
from attnplug.testing.conformance.target import Target

OF_REFERENCE = mutants_of("masks", "sinks", "sizes", "softmax", "steps", "storage")
NUMERIC = OF_REFERENCE + mutants_of(
    "accidents", "small_sizes", "crossings", "inputs", "combinations", "latents"
)
PLAIN_RANGES = ("window12", "pages512", "encoders1024")
# Large batches take most of the time, and packed cases come after many others.
LARGE = ("correct/long-", "correct/many-", "correct/far-", "correct/*-", "builder/common-prefix-")


def named(mutant: Mutant) -> str:
    return mutant.name


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, id=each.name, marks=[pytest.mark.slow] if each.check.startswith(LARGE) else [])
        for each in OF_REFERENCE
    ],
)
def test_the_named_check_catches_the_mutant(mutant: Mutant) -> None:
    asked = [check for check in checks_of_reference() if fnmatch.fnmatch(check.id, mutant.check)]
    assert asked, f"no check is called {mutant.check}"
    _, problem = next(failures_of(mutant.backend, asked), (None, None))
    assert isinstance(problem, ConformanceError), problem
    assert mutant.says in str(problem)


@pytest.mark.parametrize("mutant", mutants_of("accidents", "small_sizes", "crossings", "views"), ids=named)
def test_accidents_of_ports_are_caught_in_words(mutant: Mutant) -> None:
    _, problem = next(failures_of_torch(mutant, mutant.check), (None, None))
    assert isinstance(problem, ConformanceError), problem
    assert mutant.says in str(problem)


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, id=each.name, marks=[] if each.name in PLAIN_RANGES else [pytest.mark.slow])
        for each in mutants_of("ranges")
    ],
)
def test_a_limit_beyond_small_sizes_is_caught_in_words(mutant: Mutant) -> None:
    _, problem = next(failures_of_torch(mutant, mutant.check), (None, None))
    assert isinstance(problem, ConformanceError), problem
    assert mutant.says in str(problem)


@pytest.mark.parametrize("mutant", mutants_of("inputs", "values"), ids=named)
def test_an_input_that_is_not_ordinary_shows_what_others_hide(mutant: Mutant) -> None:
    assert list(failures_of_torch(mutant, mutant.passes)) == []
    _, problem = next(failures_of_torch(mutant, mutant.check), (None, None))
    assert isinstance(problem, ConformanceError), problem
    assert mutant.says in str(problem)


@pytest.mark.parametrize("mutant", mutants_of("combinations"), ids=named)
def test_a_rare_combination_is_caught(mutant: Mutant) -> None:
    problems = (problem_of(check) for check in named_checks(mutant, f"{mutant.check}*"))
    assert mutant.says in next(filter(None, problems), "nothing fails")


@pytest.mark.parametrize("mutant", mutants_of("latents"), ids=named)
def test_a_mistake_of_latent_attention_is_caught_and_named(mutant: Mutant) -> None:
    target, found = Target(mutant.backend, Device("cpu")), []
    runs = [(check.id, check.run) for check in (*builders.checks(target), *context_parallel.checks(target))]
    runs += [
        (f"correct/{case.id}", functools.partial(check_case, target, case)) for case in designed_cases(target)
    ]
    for name, run in [each for each in runs if fnmatch.fnmatchcase(each[0], mutant.check)][:3]:
        try:
            run()
        except ConformanceError as problem:
            found.append(f"{name}: {problem}")
    assert any(mutant.says in problem for problem in found), found


def test_the_reference_passes_some_checks() -> None:
    assert list(failures_of(ReferenceBackend, checks_of_reference()[::40])) == []


@pytest.mark.slow
@pytest.mark.rare
def test_the_reference_passes_all_checks() -> None:
    assert list(failures_of(ReferenceBackend, checks_of_reference())) == []


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("mutant", OF_REFERENCE, ids=named)
def test_the_whole_kit_catches_the_mutant(mutant: Mutant) -> None:
    # Checks of answers come first: they are the likeliest to fail.
    checks = sorted(checks_of_reference(), key=lambda check: not check.id.startswith("correct/"))
    assert any(failures_of(mutant.backend, checks))


def test_there_are_many_mutants() -> None:
    assert len(OF_REFERENCE) >= 90
