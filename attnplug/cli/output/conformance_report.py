"""The output of `attnplug conformance`: progress, each failure, and a summary."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnplug._system import files
from attnplug._system.terminal_tables import WrappedTable, verdict
from attnplug.cli.output.run_report import RunReport, counted
from attnplug.testing.conformance.mistakes.mistake_kinds import ProvenKind, proven_kinds
from attnplug.testing.isolation.failures import Failure, folded
from attnplug.testing.isolation.results import CheckOutcome, Result, SavedResults, cli_command
from attnplug.testing.skips import skip_counts, untested_words

if TYPE_CHECKING:
    from attnplug.testing.conformance.check_filter import Shard
    from attnplug.testing.isolation.listing import Listing
    from attnplug.testing.isolation.run import Limits

CHECK_SECONDS = 120.0
"""The time limit of a conformance check if none is given."""
_CAUSE_LINES = 12
"""The lines of a failure's cause that are shown."""

_OTHERS = 3
"""The other checks of a mistake that are shown."""

_MARKS = {
    CheckOutcome.PASSED: "green",
    CheckOutcome.FAILED: "red",
    CheckOutcome.SKIPPED: "yellow",
    CheckOutcome.UNTESTED: "bold yellow",
    CheckOutcome.KNOWN: "yellow",
}


class Report(RunReport):
    """Prints a run of the conformance kit; with `verbose`, failures in full."""

    def __init__(self, verbose: bool, *, err: bool = False) -> None:
        super().__init__(verbose, err=err)
        self._results: dict[str, Result] = {}
        self._tenths_printed = 0
        self._saved: SavedResults | None = None
        self._listing: Listing | None = None
        self._limits: dict[str, str | None] = {}

    @property
    def results(self) -> list[Result]:
        """The results so far, by id."""
        return sorted(self._results.values(), key=lambda each: each.id)

    def to_dict(self, listing: Listing, problem: str | None) -> dict[str, Any]:
        """The run as a JSON object; `problem` is why it stopped, if it did."""
        counts = Counter(each.outcome for each in self.results)
        return {
            "backend": listing.name,
            "device": listing.device,
            "device_name": listing.device_name,
            "level": listing.request.level,
            "options": listing.options,
            "versions": dict(listing.versions),
            "counts": {str(each): counts[each] for each in CheckOutcome},
            "checks": [
                {
                    "id": each.id,
                    "outcome": str(each.outcome),
                    "seconds": round(each.seconds, 3),
                    "cause": each.cause,
                    "mistake": each.failure.says or None,
                    "smallest_step": each.failure.test or None,
                }
                for each in self.results
            ],
            "kinds": [dataclasses.asdict(each) for each in proven_kinds(self.results, listing.ids)],
            "problem": problem,
        }

    @property
    def to_shrink(self) -> list[str]:
        """The first check of each mistake that gives wrong numbers."""
        wrong = ([each.id for each in group if each.failure.tokens] for group in self._groups())
        return [first for first, *_ in filter(None, wrong)]

    def add_smallest(self, check: str, failure: Failure) -> None:
        """Add the smallest failing step of a failed check."""
        result = self._results[check]
        if result.outcome is CheckOutcome.FAILED and failure.test:
            failure = dataclasses.replace(result.failure, size=failure.size, test=failure.test)
            self._results[check] = dataclasses.replace(result, failure=failure)

    @property
    def failed(self) -> list[Result]:
        """The checks that failed."""
        return self._with(CheckOutcome.FAILED)

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
        self._limits = {} if limits.timeout == CHECK_SECONDS else {"--timeout": f"{limits.timeout:g}"}
        self._verdicts = {check: result.outcome for check, result in earlier.items()}
        self._total, self._kept = len(ids) + len(earlier), len(earlier)
        checks = counted(self._total, "check")
        # With `only`, the listing need not have all checks.
        if self._total < len(listing.ids) and listing.request.only == ("*",):
            checks = f"{self._total} of {counted(len(listing.ids), 'check')}"
        parts = [checks, f"level {listing.request.level}", *([f"shard {shard}"] if shard else [])]
        self.tell(f"{_subject(listing)}: {', '.join([*parts, counted(limits.jobs, 'worker')])}")
        if earlier:
            self.tell(f"{counted(len(earlier), 'result')} kept from the run before")

    def save_to(self, saved: SavedResults, ids: Sequence[str]) -> None:
        """Save each result of `ids` for `--resume`."""
        try:
            saved.remove(ids)
        except OSError as problem:
            self.say(f"nothing is kept for --resume: {problem}")
        else:
            self._saved = saved

    def finished(self, result: Result) -> None:
        """A check ended; if it ends twice, the failure counts."""
        if result.id in self._results and result.outcome is not CheckOutcome.FAILED:
            return
        self._results[result.id] = result
        self._verdicts[result.id] = result.outcome
        if self._saved is not None:
            try:
                self._saved.add(result)
            except OSError as problem:
                # Each later result would fail too, and repeat the message.
                self._saved = None
                self.say(f"no more is kept for --resume: {files.why(problem)}")
        self._under_way.pop(result.id, None)
        self._tell_how_far()
        if self._verbose:
            self._show(result)
        elif result.outcome is CheckOutcome.FAILED and not self._quiet:
            self._show_name(result)
        self._print_progress()

    def interrupted(self) -> None:
        """The user stopped the run."""
        self.say("")
        self.say(f"interrupted: {self._sum()}; {self._total - len(self._results)} to go")
        self.say("run the same command with --resume to continue")

    def end(self, ids: Sequence[str], problem: str | None, *, summary: bool = False) -> None:
        """Print the failures and the counts, and for a `summary` the kinds of mistakes; no result is a failure."""
        for check in ids:
            if check not in self._results:
                self.finished(Result(check, CheckOutcome.FAILED, cause="did not run"))
        if problem:
            self.say(f"\nthe run stopped:\n{problem}")
        groups = self._groups()
        if groups:
            self.say("\nfailed:")
        for first, *others in groups:
            if self._verbose:
                self._show_name(first)
            else:
                self._show(first)
            self._show_others([each.id for each in others])
            # The first need not be about numbers.
            for result in [each for each in (first, *others) if each.failure.test][:1]:
                # Without an indent, so that it can be copied as it is.
                self.say(f"        smallest failing step, {result.failure.size}:\n\n{result.failure.test}\n")
        self.tell("")
        if summary and self._listing is not None:
            kinds = proven_kinds(self.results, self._listing.ids)
            self._out.print(_kinds_table(kinds))
            found = sum(each.verdict == "failed" for each in kinds)
            tried = found + sum(each.verdict == "passed" for each in kinds)
            verb = "was" if found == 1 else "were"
            what = f"{found} of them {verb} found" if found else "none was found"
            self.say(f"\n{tried} of {len(kinds)} kinds of mistakes were tried, and {what}\n")
        if self._listing is not None:
            versions = ", ".join(f"{name} {version}" for name, version in self._listing.versions.items())
            self.say(f"{_subject(self._listing)} with {versions}")
        if skipped := skip_counts(result.cause for result in self._with(CheckOutcome.SKIPPED)):
            self.say(f"skipped: {skipped}")
        untested = sorted(self._with(CheckOutcome.UNTESTED), key=lambda each: each.id)
        for result in untested if not self._verbose else ():
            self._show(result)
        last = untested_words(result.cause for result in untested)
        self.say(self._sum() + f" in {time.monotonic() - self._start:.0f} s{last}")

    def _groups(self) -> list[list[Result]]:
        """The failed checks of each mistake, the one to show first."""
        return folded(self.failed, () if self._listing is None else self._listing.ids)

    def _show_others(self, others: Sequence[str]) -> None:
        """The other checks that fail of a mistake."""
        if others:
            shown = others if self._verbose else others[:_OTHERS]
            more = ", ..." if len(shown) < len(others) else ""
            says = f"{counted(len(others), 'more check')} {'says' if len(others) == 1 else 'say'} the same"
            self.say(f"        and {says}: {', '.join(shown)}{more}")

    def _with(self, outcome: CheckOutcome) -> list[Result]:
        return [result for result in self._results.values() if result.outcome is outcome]

    def _show_name(self, result: Result) -> None:
        self._say_verdict(result.outcome, 7, result.id, result.seconds, _MARKS[result.outcome])

    def _show(self, result: Result) -> None:
        self._show_name(result)
        full = self._verbose and result.outcome is CheckOutcome.FAILED
        lines = (result.detail if full and result.detail else result.cause).splitlines()
        for line in lines if full else lines[:_CAUSE_LINES]:
            self.say(f"        {line}")
        if not full and len(lines) > _CAUSE_LINES:
            self.say("        ... (--verbose shows all)")
        if result.outcome is CheckOutcome.FAILED and self._listing is not None:
            self.say(f"        rerun: {cli_command(self._listing.request, result.id, self._limits)}")

    def _print_progress(self) -> None:
        """Print a line for each tenth of the run, unless a terminal shows the bar."""
        tenth = len(self._results) * 10 // max(self._total, 1)
        if not self._live and not self._verbose and tenth > self._tenths_printed and self._total >= 20:
            self._tenths_printed = tenth
            self.tell(f"{len(self._results)} of {self._total}: {self._counts()}{self._time_left()}")

    def _sum(self) -> str:
        counts = Counter(self._verdicts.values())
        failed = (
            [f"{counted(counts[CheckOutcome.FAILED], 'check')} failed"] if counts[CheckOutcome.FAILED] else []
        )
        parts = [*failed, f"{counted(counts[CheckOutcome.PASSED], 'check')} passed"]
        rest = {
            CheckOutcome.SKIPPED: "skipped",
            CheckOutcome.UNTESTED: "untested",
            CheckOutcome.KNOWN: "failed as known",
        }
        return ", ".join(
            [*parts, *(f"{counts[each]} {words}" for each, words in rest.items() if counts[each])]
        )


class SmallestSteps:
    """Observes a second run of some failed checks, which shrinks their steps; its verdicts do not count."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def started(self, check_id: str) -> None:
        """A worker starts a check."""

    def finished(self, result: Result) -> None:
        """A check ended; its smallest failing step is kept."""
        self._report.add_smallest(result.id, result.failure)


def _kinds_table(kinds: Sequence[ProvenKind]) -> WrappedTable:
    """A row for each kind of mistakes: what was proven, and what was not tried here."""
    table = WrappedTable(["kind of mistake", "result", "checks", "not tried here"], right=["checks"])
    for each in kinds:
        checks = f"{each.failed} of {each.passed + each.failed}" if each.failed else str(each.passed)
        table.add_row(each.kind, verdict(each.verdict), checks, "; ".join(each.untested))
    return table


def _subject(listing: Listing) -> str:
    device_name = f" ({listing.device_name})" if listing.device_name else ""
    options = f" with {listing.options}" if listing.options else ""
    return f"{listing.name} on {listing.device}{device_name}{options}"
