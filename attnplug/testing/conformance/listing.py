"""The list of all checks, which every entry point of the kit runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attnplug.core.backend import AttentionBackend
from attnplug.core.errors import SpecError
from attnplug.registry.devices import DeviceLike, resolve_device
from attnplug.registry.plugin_calls import describe, guarded_call
from attnplug.testing.conformance import (
    acceptance,
    builder_inputs,
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
    selections,
    shared_prefix,
    sharing,
)
from attnplug.testing.conformance.check import Check, ConformanceError, Level
from attnplug.testing.conformance.target import Target

_IN_ORDER = (
    *(declaration, pages, interface, lightness, refusals, limits, acceptance, inputs, outputs),
    *(cache_writes, cache_reads, cache_layouts, requests, correctness),
    *(builders, builder_inputs, shared_prefix, selections, sharing, merging, runtimes, gpu, graphs),
)
GROUPS: tuple[Callable[[Target], Iterator[Check]], ...] = tuple(module.checks for module in _IN_ORDER)
"""Functions that list the checks of a target, always the same in the same order."""


def conformance_checks(
    backend: type[AttentionBackend], *, device: DeviceLike = None, level: Level | str = Level.SMOKE
) -> list[Check]:
    """Every check of `backend` on a device of this machine, always the same in the same order.

    Args:
        backend: the class.
        device: as `attnplug.select` takes it; default the current one.
        level: "smoke" or "full".

    Raises:
        SpecError: an unknown level or device.
    """
    if level not in {*Level}:
        raise SpecError("level", level, f"must be one of {', '.join(Level)}")
    target = Target(backend, resolve_device(device), Level(level))
    return [check for group in GROUPS for check in listed(group, target)]


def listed(group: Callable[[Target], Iterator[Check]], target: Target) -> list[Check]:
    """The checks of one group; if the backend's declarations cannot be read, one check that fails with the cause."""
    found, error = guarded_call(lambda: list(group(target)))
    if error is None:
        return list(found)
    name = group.__module__.rpartition(".")[2]

    def run() -> None:
        raise ConformanceError(
            f"no check can be listed: reading the declarations raised {describe(error)}"
        ) from error

    return [Check(f"listed/{name}", run, f"the declarations that the checks of {name} need can be read")]
