"""The output of `attnplug conformance`: progress, each failure, and a summary."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.progress import Progress, TaskID
from rich.text import Text

from attnplug.cli.output import console, progress_bar
from attnplug.testing.isolation.results import Outcome, Result, SavedResults

if TYPE_CHECKING:
    from attnplug.testing.conformance.selection import Shard
    from attnplug.testing.isolation.listing import Listing
    from attnplug.testing.isolation.run import Limits

_CAUSE_LINES = 3
_MARKS = {Outcome.PASSED: "green", Outcome.FAILED: "red", Outcome.SKIPPED: "yellow", Outcome.KNOWN: "yellow"}


class Report:
    """Prints a run: with a progress bar on a terminal, in plain lines elsewhere.

    Args:
        verbose: print every check, and failures in full.
    """

    def __init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self._out = console()
        # The run redirects sys.stdout, because pytest prints to it.
        self._out.file = sys.stdout
        self._live = self._out.is_terminal
        self._results: dict[str, Result] = {}
        self._total = 0
        self._tenths_printed = 0
        self._running: dict[str, None] = {}
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._saved: SavedResults | None = None
        self._listing: Listing | None = None
        self._start = time.monotonic()

    @property
    def failed(self) -> list[Result]:
        """The checks that failed."""
        return [result for result in self._results.values() if result.outcome is Outcome.FAILED]

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show `what` on a terminal while the user waits."""
        with self._out.status(Text(what)) if self._live else contextlib.nullcontext():
            yield

    def begin(
        self,
        listing: Listing,
        ids: Sequence[str],
        earlier: Mapping[str, Result],
        limits: Limits,
        shard: Shard | None,
    ) -> None:
        """Print the backend, the device, and the number of checks and workers."""
        self._listing, self._results = listing, dict(earlier)
        self._total = len(ids) + len(earlier)
        checks = _count(self._total, "check")
        if self._total < len(listing.ids):
            checks = f"{self._total} of {_count(len(listing.ids), 'check')}"
        parts = [checks, f"level {listing.request.level}", *([f"shard {shard}"] if shard else [])]
        self._print(f"{_subject(listing)}: {', '.join([*parts, _count(limits.jobs, 'worker')])}")
        if earlier:
            self._print(f"{_count(len(earlier), 'result')} kept from the run before")

    def save_to(self, saved: SavedResults, ids: Sequence[str]) -> None:
        """Save each result of `ids` for `--resume`."""
        try:
            saved.remove(ids)
        except OSError as problem:
            self._print(f"nothing is kept for --resume: {problem}")
        else:
            self._saved = saved

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Show a progress bar during the run, on a terminal."""
        if not self._live:
            yield
            return
        with progress_bar(self._out) as self._bar:
            self._task = self._bar.add_task(
                "", total=self._total, completed=len(self._results), counts=self._counts(), current="starting"
            )
            yield
        self._bar = None

    def started(self, check_id: str) -> None:
        """A worker begins a check."""
        self._running[check_id] = None
        self._move_bar()

    def finished(self, result: Result) -> None:
        """A check ended; if it ends twice, the failure counts."""
        if result.id in self._results and result.outcome is not Outcome.FAILED:
            return
        self._results[result.id] = result
        if self._saved is not None:
            self._saved.add(result)
        self._running.pop(result.id, None)
        self._move_bar()
        if self._verbose:
            self._show(result)
        elif result.outcome is Outcome.FAILED:
            self._show_name(result)
        self._print_progress()

    def interrupted(self) -> None:
        """The user stopped the run."""
        self._print("")
        self._print(f"interrupted: {self._sum()}; {self._total - len(self._results)} to go")
        self._print("the same command with --resume goes on from here")

    def end(self, ids: Sequence[str], problem: str | None) -> None:
        """Print the summary; a check without a result failed."""
        for check in ids:
            if check not in self._results:
                self.finished(Result(check, Outcome.FAILED, cause="did not run"))
        if problem:
            self._print(f"\nthe run stopped:\n{problem}")
        failed = self.failed
        if failed and not self._verbose:
            self._print("\nfailed:")
            for result in sorted(failed, key=lambda each: each.id):
                self._show(result)
        self._print("")
        if self._listing is not None:
            versions = ", ".join(f"{name} {version}" for name, version in self._listing.versions.items())
            self._print(f"{_subject(self._listing)} with {versions}")
        self._print(self._sum() + f" in {time.monotonic() - self._start:.0f} s")

    def _move_bar(self) -> None:
        """Show the number of results, and the running check that started first."""
        if self._bar is not None:
            current = next(iter(self._running), "")
            done, counts = len(self._results), self._counts()
            self._bar.update(self._task, completed=done, counts=counts, current=current)

    def _show_name(self, result: Result) -> None:
        seconds = f" ({result.seconds:.1f} s)" if result.seconds >= 1 else ""
        self._print(f"{result.outcome:7} {result.id}{seconds}", style=_MARKS[result.outcome])

    def _show(self, result: Result) -> None:
        self._show_name(result)
        full = self._verbose and result.outcome is Outcome.FAILED
        lines = (result.detail if full and result.detail else result.cause).splitlines()
        for line in lines if full else lines[:_CAUSE_LINES]:
            self._print(f"        {line}")
        if not full and len(lines) > _CAUSE_LINES:
            self._print("        ... (--verbose shows all)")

    def _print_progress(self) -> None:
        """Print a line for each tenth of the run, unless a terminal shows the bar."""
        tenth = len(self._results) * 10 // max(self._total, 1)
        if not self._live and not self._verbose and tenth > self._tenths_printed and self._total >= 20:
            self._tenths_printed = tenth
            self._print(f"{len(self._results)} of {self._total}: {self._counts()}")

    def _counts(self) -> str:
        counts = Counter(result.outcome for result in self._results.values())
        return ", ".join(f"{counts[each]} {each}" for each in Outcome if counts[each])

    def _sum(self) -> str:
        counts = Counter(result.outcome for result in self._results.values())
        failed = [f"{_count(counts[Outcome.FAILED], 'check')} failed"] if counts[Outcome.FAILED] else []
        parts = [*failed, f"{_count(counts[Outcome.PASSED], 'check')} passed"]
        rest = {Outcome.SKIPPED: "skipped", Outcome.KNOWN: "failed as known"}
        return ", ".join(
            [*parts, *(f"{counts[each]} {words}" for each, words in rest.items() if counts[each])]
        )

    def _print(self, text: str, style: str | None = None) -> None:
        # soft_wrap leaves wrapping to the terminal, so that files keep whole lines.
        self._out.print(Text(text, style or ""), soft_wrap=True)


def _subject(listing: Listing) -> str:
    device_name = f" ({listing.device_name})" if listing.device_name else ""
    return f"{listing.name} on {listing.device}{device_name}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
