"""The one list of checks that all doors open on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attnplug.core.backend import AttentionBackend
from attnplug.core.errors import SpecError
from attnplug.registry.devices import DeviceLike, resolve_device
from attnplug.testing.conformance import correctness
from attnplug.testing.conformance.check import Check, Level
from attnplug.testing.conformance.target import Target

__all__ = ["GROUPS", "conformance_checks"]

GROUPS: tuple[Callable[[Target], Iterator[Check]], ...] = (correctness.checks,)
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
    return [check for group in GROUPS for check in group(target)]
