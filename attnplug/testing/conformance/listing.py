"""The one list of checks that all doors open on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attnplug.core.backend import AttentionBackend
from attnplug.core.errors import SpecError
from attnplug.registry.devices import DeviceLike, resolve_device
from attnplug.registry.plugin_calls import describe, guarded_call
from attnplug.testing.conformance import (
    answers,
    assumptions,
    builders,
    cache_layouts,
    cache_reads,
    cache_writes,
    correctness,
    declaration,
    gpu,
    graphs,
    inputs,
    interface,
    lightness,
    limits,
    merging,
    outputs,
    pages,
    refusals,
    requests,
    runtimes,
    sharing,
    sizes,
)
from attnplug.testing.conformance.check import Check, ConformanceError, Level
from attnplug.testing.conformance.target import Target

__all__ = ["GROUPS", "conformance_checks", "listed"]

GROUPS: tuple[Callable[[Target], Iterator[Check]], ...] = (
    declaration.checks,
    sizes.checks,
    pages.checks,
    interface.checks,
    lightness.checks,
    refusals.checks,
    limits.checks,
    answers.checks,
    inputs.checks,
    outputs.checks,
    cache_writes.checks,
    cache_reads.checks,
    cache_layouts.checks,
    requests.checks,
    correctness.checks,
    builders.checks,
    assumptions.checks,
    sharing.checks,
    merging.checks,
    runtimes.checks,
    gpu.checks,
    graphs.checks,
)
"""Each gives its checks of a target, always the same in the same order."""


def conformance_checks(
    backend: type[AttentionBackend], *, device: DeviceLike = None, level: Level | str = Level.SMOKE
) -> list[Check]:
    """Every check of `backend` on a device of this machine, always the same in the same order.

    Args:
        backend: the class.
        device: as `attnplug.select` takes it; default the current one.
        level: "smoke" or "full".

    Raises:
        SpecError: a level that is none, or a device that means nothing.
    """
    if level not in {*Level}:
        raise SpecError("level", level, f"must be one of {', '.join(Level)}")
    target = Target(backend, resolve_device(device), Level(level))
    return [check for group in GROUPS for check in listed(group, target)]


def listed(group: Callable[[Target], Iterator[Check]], target: Target) -> list[Check]:
    """The checks of one group; where the backend's declarations are such that none can be listed, one that says so."""
    found, error = guarded_call(lambda: list(group(target)))
    if error is None:
        return list(found)
    name = group.__module__.rpartition(".")[2]

    def run() -> None:
        raise ConformanceError(
            f"no check can be listed: asking for declarations raised {describe(error)}"
        ) from error

    return [
        Check(f"listed/{name}", run, f"the declarations can be read that the checks of {name} follow from")
    ]
