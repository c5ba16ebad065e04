"""Mutants of structure, state and declarations: the right check catches each, with words that help."""

from __future__ import annotations

import atexit
import builtins
import copy
import gc
import itertools
import logging
import os
import signal
from collections.abc import Iterator

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
import mutants.limits
import mutants.names
import mutants.plans
import mutants.process
import mutants.refusals
import mutants.state
import mutants.structure  # noqa: F401 - each import lists its mutants
import pytest
import torch
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
_PLAIN_LEAKS = ("grows_history", "keeps_layers")


def named(mutant: Mutant) -> str:
    return mutant.name


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves the process as it was, also where the kit cannot set a value back."""
    before, printed = read_settings(), copy.copy(torch._tensor_str.PRINT_OPTS)
    monkeypatch.setattr(torch.nn.functional, "softmax", torch.nn.functional.softmax)
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.cpu)
    monkeypatch.setattr(builtins, "round", builtins.round)
    monkeypatch.setattr(os, "getpriority", os.getpriority)
    monkeypatch.setattr(logging.root, "handlers", [*logging.root.handlers])
    handler = signal.getsignal(signal.SIGUSR1)
    yield
    gc.enable()
    signal.signal(signal.SIGUSR1, handler)
    vars(torch._tensor_str.PRINT_OPTS).update(vars(printed))
    atexit.unregister(int)
    restore_settings(before)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong caches grow at once; a busy machine must not try fewer steps or lengths than these."""
    for name, value in {
        "_STEPS": 100,
        "_LAYERS": 20,
        "_MOST_ROUNDS": 3,
        "_SECONDS": 60.0,
        "_SLOW": 60.0,
    }.items():
        monkeypatch.setattr(process_memory, name, value)


@pytest.mark.parametrize("mutant", mutants_of("process"), ids=named)
@pytest.mark.usefixtures("process")
def test_a_change_of_the_process_is_named(mutant: Mutant) -> None:
    problems = [problem_of(check) for check in named_checks(mutant, mutant.check)]
    assert [problem for problem in problems if problem is None or mutant.says not in problem] == []
    assert problems


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


@pytest.mark.parametrize("mutant", [sampled(mutant) for mutant in mutants_of("state")])
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
