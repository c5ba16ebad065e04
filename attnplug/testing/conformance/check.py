"""One conformance check: a name, and something to run."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from attnplug.core.errors import AttnplugError

__all__ = ["Check", "CheckSkipped", "ConformanceError", "Level"]


class Level(enum.StrEnum):
    """How much of the space of layers and batches is tried."""

    SMOKE = "smoke"
    """A few values of each axis, in pairs: under a minute on two cores."""
    FULL = "full"
    """All values, every pair of them in several designs."""


class ConformanceError(AssertionError):
    """A backend that does not do what it says.

    Args:
        message: what was expected and what came.
        named: the misreading that explains the numbers, as "window off by one", where one does.
    """

    def __init__(self, message: str, named: str | None = None) -> None:
        super().__init__(message)
        self.named = named


class CheckSkipped(AttnplugError):  # noqa: N818 - not an error: it says why a check says nothing here
    """A check that has nothing to try with this backend, on this machine; the text says why."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Check:
    """One thing that a backend must do.

    Args:
        id: its name, as "correct/decode-h8x2-d64-float32"; the same wherever the declaration is.
        run: raises ConformanceError, or whatever the backend raises; CheckSkipped where it cannot tell.
        summary: one sentence that says what is checked.
        group: checks of one group share what is compiled: where workers are told of groups, one worker runs
            them, one after another. None for a check alone.
    """

    id: str
    run: Callable[[], None]
    summary: str
    group: str | None = None

    def __call__(self) -> None:
        """Run the check."""
        self.run()
