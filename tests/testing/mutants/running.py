"""Runs the kit's checks on mutants; the checks are listed once, for the reference."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from attnplug.core import AttentionBackend, Device
from attnplug.testing.conformance.check import Check, CheckSkipped, Level
from attnplug.testing.conformance.listing import conformance_checks
from attnplug.testing.conformance.target import Target
from mutants.declared import ReferenceBackend

DEVICE = Device("cpu")


@functools.cache
def checks_of_reference(level: Level = Level.SMOKE) -> list[Check]:
    """The kit's checks; mutants declare what the reference declares, so theirs are the same."""
    return conformance_checks(ReferenceBackend, device="cpu", level=level)


def failures_of(
    backend: type[AttentionBackend], checks: list[Check], level: Level = Level.SMOKE
) -> Iterator[tuple[str, Exception]]:
    """The checks that fail for `backend`, one after another, and their errors."""
    target = Target(backend, DEVICE, level)
    for check in checks:
        run = check.run
        assert isinstance(run, functools.partial), check.id
        given = [target if isinstance(each, Target) else each for each in run.args]
        try:
            run.func(*given, **run.keywords)
        except CheckSkipped:
            continue
        except Exception as problem:
            yield check.id, problem
