"""What became of each check, and of the run."""

from __future__ import annotations

import dataclasses
import enum
from typing import Protocol

__all__ = ["Outcome", "Result", "Watcher"]


class Outcome(enum.StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It has nothing to try with this backend here."""
    KNOWN = "known"
    """It failed, as the known failures say."""


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One check's end.

    Args:
        id: the check's.
        outcome: how it ended.
        seconds: how long it took.
        cause: why it failed, is skipped, or is known to fail; "" where it passed.
        detail: the traceback, or what a worker wrote before it died; may be "".
    """

    id: str
    outcome: Outcome
    seconds: float = 0.0
    cause: str = ""
    detail: str = ""


class Watcher(Protocol):
    """Whoever is told how the run goes, in the process that asked for it."""

    def started(self, check_id: str) -> None:
        """A worker begins a check."""

    def finished(self, result: Result) -> None:
        """A check ended. The same check may end again, worse: its worker died after it had passed."""
