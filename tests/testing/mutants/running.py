"""Runs the kit's checks on mutants; checks that all mutants of a backend share are list_group once."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Iterator

from catching import torch_cases

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import AttentionBackend, Device
from attnplug.testing.conformance.check import Check, CheckSkipped, Level
from attnplug.testing.conformance.listing import GROUPS, conformance_checks, list_group
from attnplug.testing.conformance.numbers import correctness
from attnplug.testing.conformance.target import Target
from mutants.declared import ReferenceBackend
from mutants.table import Mutant

DEVICE = Device("cpu")


@functools.cache
def checks_of(backend: type[AttentionBackend], level: Level = Level.SMOKE) -> list[Check]:
    """The kit's checks; mutants with the same declarations have the same."""
    return conformance_checks(backend, device=DEVICE, level=level)


def checks_of_reference() -> list[Check]:
    """Those of the reference."""
    return checks_of(ReferenceBackend)


def failures_of(backend: type[AttentionBackend], checks: list[Check]) -> Iterator[tuple[str, Exception]]:
    """The checks of another backend that fail for this one, one after another, and their errors."""
    for check in checks:
        run = check.run
        assert isinstance(run, functools.partial), check.id
        given = [
            dataclasses.replace(each, backend=backend) if isinstance(each, Target) else each
            for each in run.args
        ]
        try:
            run.func(*given, **run.keywords)
        except CheckSkipped:
            continue
        except Exception as problem:
            yield check.id, problem


def failures_of_torch(mutant: Mutant, pattern: str) -> Iterator[tuple[str, Exception]]:
    """Those of TORCH's checks that match a pattern, which some must."""
    checks = [check for check in checks_of(TorchBackend) if fnmatch.fnmatchcase(check.id, pattern)]
    assert checks, f"no check is called {pattern}"
    return failures_of(mutant.backend, checks)


def numeric_checks(mutant: Mutant, pattern: str) -> list[Check]:
    """The numeric cases of TORCH, which are the mutant's too: a search for its own would find the same."""
    target = Target(mutant.backend, DEVICE)
    named = ((f"correct/{case.id}", case) for case in torch_cases())
    return [
        Check.of(name, "", correctness.check_case, target, case)
        for name, case in named
        if fnmatch.fnmatchcase(name, pattern)
    ]


def named_checks(mutant: Mutant, pattern: str) -> list[Check]:
    """The mutant's own checks that match a pattern."""
    if pattern.startswith("correct/"):
        return numeric_checks(mutant, pattern)
    target = Target(mutant.backend, DEVICE)
    groups = (group for group in GROUPS if group is not correctness.checks)
    checks = (check for group in groups for check in list_group(group, target))
    return [check for check in checks if fnmatch.fnmatchcase(check.id, pattern)]


def first_failure(mutant: Mutant) -> Exception | None:
    """The error of the first check that the row names and that fails."""
    base = ReferenceBackend if issubclass(mutant.backend, ReferenceBackend) else TorchBackend
    asked = [check for check in checks_of(base) if fnmatch.fnmatchcase(check.id, mutant.check)]
    if not asked:
        asked = named_checks(mutant, f"{mutant.check}*")
    return next((problem for _, problem in failures_of(mutant.backend, asked)), None)


def problem_of(check: Check) -> str | None:
    """What a check says that fails."""
    try:
        check()
    except CheckSkipped:
        return None
    except Exception as problem:
        return str(problem)
    return None
