"""Each wrong backend of latent attention fails its checks, with words that name the mistake."""

from __future__ import annotations

import fnmatch
import functools

import pytest
from catching import Wrong
from wrong_latents import WRONG_LATENTS

from attnplug.core import Device
from attnplug.testing.conformance.builders import builders
from attnplug.testing.conformance.cases.designed_cases import designed_cases
from attnplug.testing.conformance.check import ConformanceError
from attnplug.testing.conformance.numbers.correctness import check_case
from attnplug.testing.conformance.serving import context_parallel
from attnplug.testing.conformance.target import Target


def problems(wrong: Wrong) -> list[str]:
    target, found = Target(wrong.backend, Device("cpu")), []
    listed = [*builders.checks(target), *context_parallel.checks(target)]
    runs = [(check.id, check.run) for check in listed]
    runs += [
        (f"correct/{case.id}", functools.partial(check_case, target, case)) for case in designed_cases(target)
    ]
    for name, run in [each for each in runs if fnmatch.fnmatchcase(each[0], wrong.check)][:3]:
        try:
            run()
        except ConformanceError as problem:
            found.append(f"{name}: {problem}")
    return found


@pytest.mark.parametrize("wrong", WRONG_LATENTS, ids=lambda wrong: wrong.name)
def test_a_mistake_of_latent_attention_is_caught_and_named(wrong: Wrong) -> None:
    found = problems(wrong)
    assert found
    assert any(wrong.says in problem for problem in found), found
