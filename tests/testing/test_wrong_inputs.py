"""Each backend that is right for ordinary inputs alone fails the check of the input that it gets wrong."""

from __future__ import annotations

import fnmatch
import functools

import pytest
from catching import torch_cases
from wrong_inputs import WRONG_INPUTS, WrongInput

from attnplug.core import Device
from attnplug.testing.conformance import ConformanceError
from attnplug.testing.conformance.cases.cases import Case
from attnplug.testing.conformance.numbers import cache_writes, correctness
from attnplug.testing.conformance.target import Target


@functools.cache
def torch_cases_by_id() -> dict[str, Case]:
    return {f"correct/{case.id}": case for case in torch_cases()}


def run(wrong: WrongInput, check_id: str) -> None:
    target = Target(wrong.backend, Device("cpu"))
    if check_id.startswith("cache/"):
        next(check for check in cache_writes.scale_checks(target) if check.id == check_id)()
        return
    found = fnmatch.filter(torch_cases_by_id(), check_id)
    assert found, check_id
    correctness.check_case(target, torch_cases_by_id()[found[0]])


@pytest.mark.parametrize("wrong", WRONG_INPUTS, ids=lambda wrong: wrong.name)
def test_an_input_that_is_not_ordinary_shows_what_others_hide(wrong: WrongInput) -> None:
    run(wrong, wrong.passes)
    with pytest.raises(ConformanceError) as caught:
        run(wrong, wrong.check)
    assert wrong.says in str(caught.value)


def test_names_are_unique() -> None:
    names = [wrong.name for wrong in WRONG_INPUTS]
    assert len(set(names)) == len(names)
