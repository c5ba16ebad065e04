"""The progress of a run in workers, for `attnplug conformance` and `attnplug matrix --verify`.

Words for a step that lasts, on standard error of a terminal.
"""

from __future__ import annotations

import contextlib
import enum
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from attnplug._system.terminal_tables import SafeConsole
from attnplug.cli.output.output import console
from attnplug.cli.output.own_output import is_quiet

CAUSE_LINES = 3
"""The lines of a failure's cause that are shown."""


class RunReport:
    """Prints a run: with a progress bar if standard error is a terminal, in plain lines elsewhere.

    Args:
        verbose: print every check or cell, unless the command is quiet.
        err: print to standard error, because standard output has JSON.
    """

    def __init__(self, verbose: bool, *, err: bool = False) -> None:
        self._quiet = is_quiet()
        self._verbose = verbose and not self._quiet
        self._out = console(err=err)
        self._progress = console(err=True)
        # FORCE_COLOR makes rich see a terminal in a file, and a bar there is only noise.
        is_terminal = sys.stderr.isatty() or os.environ.get("TTY_COMPATIBLE") == "1"
        self._live = is_terminal and not (self._progress.is_dumb_terminal or self._quiet)
        self._verdicts: dict[str, enum.StrEnum] = {}
        self._total = self._kept = 0
        self._under_way: dict[str, None] = {}
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._start = time.monotonic()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show `what` on a terminal while the user waits."""
        with self._progress.status(Text(what)) if self._live else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def bar(self) -> Iterator[None]:
        """Show a progress bar during the run, on a terminal; it disappears when done."""
        if not self._live:
            yield
            return
        current = TextColumn(
            "{task.fields[current]}",
            style="dim",
            markup=False,
            table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
        )
        counts = TextColumn("{task.fields[counts]}")
        columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), counts, current)
        self._bar = Progress(
            *columns, console=self._progress, transient=True, expand=True, redirect_stdout=False
        )
        done, now = len(self._verdicts), self._counts()
        self._task = self._bar.add_task("", total=self._total, completed=done, counts=now, current="starting")
        try:
            with self._bar:
                yield
        finally:
            self._bar = None

    def started(self, check_id: str) -> None:
        """A worker begins a check or cell."""
        self._under_way[check_id] = None
        self._tell_how_far()

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line."""
        # The bar is on the same terminal, and would be mixed with the line.
        if self._bar is not None:
            self._bar.stop()
        # soft_wrap leaves wrapping to the terminal, so that files keep whole lines.
        self._out.print(Text(text, style or ""), soft_wrap=True)
        if self._bar is not None:
            self._bar.start()

    def tell(self, text: str, style: str | None = None) -> None:
        """Print a line about progress or what to do, unless the command is quiet."""
        if not self._quiet:
            self.say(text, style)

    def _say_verdict(
        self, verdict: str, width: int, check_id: str, seconds: float, style: str | None
    ) -> None:
        took = f" ({seconds:.1f} s)" if seconds >= 1 else ""
        self.say(f"{verdict:{width}} {check_id}{took}", style)

    def _tell_how_far(self) -> None:
        """Move the bar, which names the check or cell that has been under way for longest."""
        if self._bar is not None:
            oldest, done = next(iter(self._under_way), ""), len(self._verdicts)
            counts = self._counts() + self._time_left()
            self._bar.update(self._task, completed=done, counts=counts, current=oldest)

    def _counts(self) -> str:
        return counts_in_words(Counter(self._verdicts.values()))

    def _time_left(self) -> str:
        """The time that the rest takes at the speed so far; empty before a result."""
        done, rest = len(self._verdicts) - self._kept, self._total - len(self._verdicts)
        if done <= 0 or rest <= 0:
            return ""
        return f", about {in_words((time.monotonic() - self._start) * rest / done)} left"


def counts_in_words(counts: Mapping[enum.StrEnum, int]) -> str:
    """The counts in the order of the enumeration: "3 passed, 1 failed"."""
    kinds = type(next(iter(counts))) if counts else ()
    return ", ".join(f"{counts[each]} {each}" for each in kinds if counts.get(each))


def in_words(seconds: float) -> str:
    """A time that need not be exact: "50 s", "12 min", "2 h 5 min"."""
    if seconds < 100:
        return f"{max(round(seconds), 1)} s"
    hours, minutes = divmod(max(round(seconds / 60), 1), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def counted(number: int, what: str) -> str:
    """A number and a noun: "1 check", "2 checks"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


AFTER = 0.5
"""Seconds after which a user wonders what the command does."""


@contextlib.contextmanager
def waiting(words: str, after: float = AFTER, console: Console | None = None) -> Iterator[None]:
    """Inside the block, a spinner with `words` from `after` seconds on; nothing where no one reads a terminal."""
    console = console or SafeConsole(file=sys.stderr)
    if is_quiet() or not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    status = console.status(words)
    timer = threading.Timer(after, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # A start that has begun must end before the stop.
        timer.join()
        status.stop()
