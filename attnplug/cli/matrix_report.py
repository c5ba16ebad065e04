"""The output of `attnplug matrix --verify`: progress, each refutation, and a summary."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.progress import Progress, TaskID
from rich.text import Text

from attnplug.cli.output import console, progress_bar
from attnplug.matrix.model import Run, Status
from attnplug.testing.isolation.results import Result

if TYPE_CHECKING:
    from attnplug.matrix.verify import Verification
    from attnplug.testing.isolation.run import Limits

_CAUSE_LINES = 3
_SECONDS = 30.0
"""Seconds between two saves, and without a bar between two lines of progress."""


class MatrixReport:
    """Prints the runs of one backend after another: with a bar on a terminal, else in lines.

    Args:
        verbose: print every cell.
        save: writes the results so far; called every 30 seconds.
    """

    def __init__(self, verbose: bool, save: Callable[[], None]) -> None:
        self._verbose = verbose
        self._save = save
        self._out = console()
        # Fixed here: rich looks sys.stdout up at each print, and pytest replaces it while it runs.
        self._out.file = sys.stdout
        self._live = self._out.is_terminal
        self._statuses: dict[str, Status] = {}
        self._status_of: Callable[[Result], Status] | None = None
        self._under_way: dict[str, None] = {}
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._total = 0
        self._start = self._told = self._saved = time.monotonic()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show on a terminal what the command is waiting for."""
        with self._out.status(Text(what)) if self._live else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def running(self, what: str, verification: Verification, limits: Limits) -> Iterator[None]:
        """Print the number of cells and workers, then show progress during the run."""
        self._begin(verification)
        kept = len(self._statuses)
        parts = [_count(self._total, "cell"), _count(limits.jobs, "worker")]
        parts += [_count(verification.compile_keys, "compile key")] if verification.compile_keys else []
        parts += [f"{kept} kept from the run before"] if kept else []
        self.say(f"{what}: {', '.join(parts)}")
        if not self._live:
            yield
            return
        with progress_bar(self._out) as bar:
            self._bar = bar
            self._task = bar.add_task(
                "", total=self._total, completed=kept, counts=self._counts(), current="starting"
            )
            try:
                yield
            finally:
                self._bar = None

    def started(self, check_id: str) -> None:
        """A worker begins a cell."""
        self._under_way[check_id] = None
        self._tell_how_far()

    def finished(self, result: Result) -> None:
        """A cell ended."""
        status = Status.NOT_RUN if self._status_of is None else self._status_of(result)
        self._statuses[result.id] = status
        self._under_way.pop(result.id, None)
        if self._verbose or status is Status.REFUTED:
            seconds = f" ({result.seconds:.1f} s)" if result.seconds >= 1 else ""
            style = "red" if status is Status.REFUTED else None
            self.say(f"{status:9} {result.id}{seconds}", style)
            # The tables that follow have the whole evidence.
            for line in result.cause.splitlines()[:_CAUSE_LINES] if self._verbose else ():
                self.say(f"          {line}")
        self._tell_how_far()
        if time.monotonic() - self._saved > _SECONDS:
            self._save()
            self._saved = time.monotonic()

    def end(self, what: str, run: Run, problem: str | None = None) -> None:
        """Sum up one backend."""
        counts = Counter(finding.status for finding in run.findings)
        why = Counter(
            finding.why[0] for finding in run.findings if finding.status is Status.NOT_RUN and finding.why
        )
        words = ", ".join(f"{counts[each]} {each}" for each in Status if counts[each])
        self.say(f"{what}: {words or 'no cells'} in {time.monotonic() - self._start:.0f} s")
        for text, number in why.most_common(_CAUSE_LINES):
            self.say(f"  {number} not run: {text.splitlines()[0]}")
        if len(why) > _CAUSE_LINES:
            self.say(f"  ... and {_count(len(why) - _CAUSE_LINES, 'other reason')}")
        if problem:
            self.say(f"the run stopped:\n{problem}")

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line."""
        # soft_wrap: a terminal wraps long lines itself, and a file keeps them whole.
        self._out.print(Text(text, style or ""), soft_wrap=True)

    def _begin(self, verification: Verification) -> None:
        self._status_of = verification.status_of
        self._statuses = {
            each: verification.status_of(result) for each, result in verification.results.items()
        }
        self._under_way = {}
        self._total = len(verification.ids)
        self._start = self._told = time.monotonic()

    def _tell_how_far(self) -> None:
        """Move the bar, which names the oldest cell under way; without a bar, print a line every 30 seconds."""
        done = len(self._statuses)
        if self._bar is not None:
            current = next(iter(self._under_way), "")
            self._bar.update(self._task, completed=done, counts=self._counts(), current=current)
        elif not self._live and time.monotonic() - self._told > _SECONDS:
            self._told = time.monotonic()
            self.say(f"  {done} of {self._total}: {self._counts()}")

    def _counts(self) -> str:
        counts: Mapping[Status, int] = Counter(self._statuses.values())
        return ", ".join(f"{counts[each]} {each}" for each in Status if counts.get(each))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
