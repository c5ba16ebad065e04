"""Designed cases that one process searched for and another takes over: the listing's, for its workers."""

from __future__ import annotations

import pickle

from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.conformance.cases import Case
from attnplug.testing.conformance.designed_cases import designed_cases
from attnplug.testing.conformance.target import Target


class Designs:
    """The designed cases of the targets of one suite.

    Another process has other objects for the same target, so it is known by its names.

    Args:
        written: what `written` gave in another process; None if nothing was found before.
    """

    def __init__(self, written: bytes | None = None) -> None:
        # A backend of the other process may have damaged them: then they are searched for again.
        read, problem = guarded_call(lambda: dict(pickle.loads(written)) if written else {})  # noqa: S301
        self._taken: dict[tuple[str, ...], list[Case] | None] = {} if problem is not None else read
        self._found: dict[tuple[str, ...], list[Case] | None] = {}

    def of(self, target: Target) -> list[Case]:
        """The cases of a target, searched for unless another process has found them."""
        backend = target.backend
        key = (backend.__module__, backend.__qualname__, target.name, str(target.device), target.level)
        cases = self._taken.get(key)
        cases = designed_cases(target) if cases is None else cases
        # Two targets with equal names are not told apart, so neither is kept.
        self._found[key] = None if key in self._found else cases
        return cases

    def written(self) -> bytes:
        """The cases of all targets that were asked for."""
        return pickle.dumps(self._found)
