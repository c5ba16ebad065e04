"""Wrong backends of structure, state and declarations: the right check catches each, with words that help."""

from __future__ import annotations

import atexit
import builtins
import copy
import fnmatch
import gc
import logging
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from catching import Wrong, torch_cases
from wrong_calls import WRONG_CALLS
from wrong_claims import WRONG_CLAIMS
from wrong_edges import WRONG_EDGES
from wrong_halves import WRONG_HALVES
from wrong_layers import WRONG_LAYERS
from wrong_plans import WRONG_PLANS
from wrong_process import WRONG_PROCESS

from attnplug.core import Device
from attnplug.testing.conformance.check import Check, CheckSkipped
from attnplug.testing.conformance.listing import conformance_checks
from attnplug.testing.conformance.numbers.correctness import check_case
from attnplug.testing.conformance.process.process_settings import read_settings, restore_settings
from attnplug.testing.conformance.target import Target

ALL = [
    wrong
    for wrong in (*WRONG_CALLS, *WRONG_CLAIMS, *WRONG_EDGES, *WRONG_HALVES, *WRONG_LAYERS, *WRONG_PLANS)
    if wrong.check != "*"
]


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


@pytest.mark.parametrize("wrong", WRONG_PROCESS, ids=lambda wrong: wrong.name)
@pytest.mark.usefixtures("process")
def test_a_change_of_the_process_is_named(wrong: Wrong) -> None:
    problems = [problem_of(check) for check in named_checks(wrong)]
    assert [problem for problem in problems if problem is None or wrong.says not in problem] == []
    assert problems


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
@pytest.mark.rare
@pytest.mark.parametrize("wrong", ALL, ids=lambda wrong: wrong.name)
def test_the_whole_kit_catches_it(wrong: Wrong) -> None:
    listed = conformance_checks(wrong.backend, device="cpu")
    assert any(problem_of(check) for check in listed if not check.id.startswith("declaration/light"))
