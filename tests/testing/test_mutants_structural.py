"""Mutants of structure, state and declarations: the right check catches each, with words that help."""

from __future__ import annotations

import atexit
import gc
import itertools
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mutants.batches
import mutants.builders
import mutants.caches
import mutants.calls
import mutants.claims
import mutants.declarations
import mutants.edges
import mutants.halves
import mutants.hooks
import mutants.layers
import mutants.leaks
import mutants.limits
import mutants.names
import mutants.plans
import mutants.process
import mutants.refusals
import mutants.state
import mutants.structure
import pytest
from mutants.running import named_checks, problem_of
from mutants.table import MUTANTS, Mutant, mutants_of

from attnplug.testing.conformance.listing import conformance_checks
from attnplug.testing.conformance.process import process_memory
from attnplug.testing.conformance.process.process_settings import read_settings, restore_settings

FAMILIES = ("calls", "claims", "edges", "halves", "layers", "names", "plans")
ALL = [mutant for mutant in mutants_of(*FAMILIES) if mutant.check != "*"]
NUMERIC = [mutant for mutant in ALL if mutant.check.startswith("correct/")]
OTHERS = [mutant for mutant in ALL if mutant not in NUMERIC]
BY_START = mutants_of(
    *("batches", "builders", "caches", "declarations", "limits", "refusals", "structure"),
)
# What these do has an effect once, or is left as it is because tests and coverage do it too.
_ONCE = ("captures_warnings", "freezes", "leaves_folder_at_home", "profiles", "sets_device")
EACH_CALL = [
    each
    for each in mutants_of("process")
    if each.check == "state/settings-kept-decode" and each.name not in _ONCE
]
_PLAIN_LEAKS = ("grows_history", "keeps_layers")


def named(mutant: Mutant) -> str:
    return mutant.name


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Leaves the process as it was, also where the kit cannot set a value back; has folders of its own to write to."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # Tests begin with what was imported frozen, and a backend that freezes would change nothing.
    gc.unfreeze()
    before = read_settings()
    yield
    gc.unfreeze()
    logging.captureWarnings(False)
    atexit.unregister(int)
    for each in mutants.process.LIBRARIES:
        each._destroy()
    mutants.process.LIBRARIES.clear()
    restore_settings(before)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong caches grow at once."""
    monkeypatch.setattr(process_memory, "_MOST", 170)


@pytest.mark.parametrize("mutant", mutants_of("process"), ids=named)
@pytest.mark.usefixtures("process")
def test_a_change_of_the_process_is_named(mutant: Mutant) -> None:
    problems = [problem_of(check) for check in named_checks(mutant, mutant.check)]
    assert [problem for problem in problems if problem is None or mutant.says not in problem] == []
    assert problems


@pytest.mark.parametrize("mutant", EACH_CALL, ids=named)
@pytest.mark.usefixtures("process")
def test_a_setting_that_each_call_makes_is_found_after_other_checks(mutant: Mutant) -> None:
    (other,) = named_checks(mutant, "state/no-grad")
    problem_of(other)
    (check,) = named_checks(mutant, mutant.check)
    # The kit may name the variable that has its value already.
    says = mutant.says if "environment" not in mutant.says else "environment variable ACME"
    assert says.partition(":")[0] in (problem_of(check) or "no change")


@pytest.mark.parametrize("mutant", NUMERIC, ids=named)
def test_a_numeric_case_catches_it_with_words_that_point_at_the_mistake(mutant: Mutant) -> None:
    checks = named_checks(mutant, mutant.check)
    assert any(mutant.says in (problem_of(check) or "right") for check in checks[:8])


@pytest.mark.parametrize("mutant", OTHERS, ids=named)
def test_the_right_check_catches_it_with_words_that_point_at_the_mistake(mutant: Mutant) -> None:
    problems = [problem_of(check) for check in named_checks(mutant, mutant.check)]
    assert problems
    assert all(problem and mutant.says in problem for problem in problems), problems


@pytest.mark.parametrize("mutant", BY_START, ids=named)
def test_all_checks_that_fail_name_the_cause(mutant: Mutant) -> None:
    problems = [problem_of(check) for check in named_checks(mutant, f"{mutant.check}*")]
    assert any(problems)
    assert [problem for problem in problems if problem and mutant.says not in problem] == []


@pytest.mark.parametrize("mutant", mutants_of("hooks"), ids=named)
def test_a_hook_that_is_wrong_in_some_states_is_caught_in_words(mutant: Mutant) -> None:
    problems = [problem_of(check) for check in named_checks(mutant, mutant.check)]
    assert any(problem and mutant.says in problem for problem in problems), problems


def sampled(mutant: Mutant) -> object:
    """A test of the mutant; the checks of memory run 1,600 steps, so a plain run has one that fails them."""
    is_long = mutant.check.startswith("state/memory") and mutant.name not in _PLAIN_LEAKS
    return pytest.param(mutant, id=mutant.name, marks=[pytest.mark.slow] if is_long else [])


@pytest.mark.parametrize("mutant", [sampled(mutant) for mutant in mutants_of("state", "leaks")])
@pytest.mark.usefixtures("process", "few_steps")
def test_a_state_that_is_kept_is_named(mutant: Mutant) -> None:
    test_all_checks_that_fail_name_the_cause(mutant)


def test_the_names_of_a_family_are_unique() -> None:
    for _, family in itertools.groupby(
        MUTANTS, key=lambda mutant: (mutant.family, mutant.backend.__mro__[1])
    ):
        names = [mutant.name for mutant in family]
        assert len(set(names)) == len(names)


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize("mutant", ALL, ids=named)
def test_the_whole_kit_catches_it(mutant: Mutant) -> None:
    listed = conformance_checks(mutant.backend, device="cpu")
    assert any(problem_of(check) for check in listed if not check.id.startswith("declaration/light"))
