"""`attnplug conformance --engine`: the numeric checks of a backend through the clients of engines, in one table."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from attnplug._system.terminal_tables import WrappedTable, verdict
from attnplug.cli.output.conformance_report import Report
from attnplug.cli.output.output import CommandError, console, echo, print_json
from attnplug.cli.own_process import interrupt_on_sigterm
from attnplug.core.errors import PolicyError
from attnplug.engines.table import EngineRow, read_engines
from attnplug.testing.conformance.check import SkipKind
from attnplug.testing.isolation.results import CheckOutcome

if TYPE_CHECKING:
    from attnplug.testing.conformance.check_filter import Shard
    from attnplug.testing.isolation.listing import Listing, SuiteRequest
    from attnplug.testing.isolation.results import Result
    from attnplug.testing.isolation.run import Limits

_FAILED, _INTERRUPTED = 1, 130
_LISTING_SECONDS = 300.0


class EngineReport(Report):
    """The report of a run through one engine; lines to rerun a check name it."""

    def __init__(self, row: EngineRow, verbose: bool, *, err: bool) -> None:
        super().__init__(verbose, err=err)
        self.row = row
        self.problem: str | None = row.absent

    def begin(
        self,
        listing: Listing,
        ids: Sequence[str],
        earlier: Mapping[str, Result],
        limits: Limits,
        shard: Shard | None,
    ) -> None:
        """As `Report.begin`, after the engine's name."""
        self.tell(f"through {self.row.name}:")
        super().begin(listing, ids, earlier, limits, shard)
        self._limits["--engine"] = self.row.name

    @property
    def verdict(self) -> str:
        """passed, failed, or skipped if the engine is not installed or can ask for none of the layers."""
        if self.row.absent:
            return "skipped"
        if self.failed or self.problem:
            return "failed"
        return "passed" if any(each.outcome is CheckOutcome.PASSED for each in self.results) else "skipped"

    def reasons(self) -> Counter[str]:
        """How many checks were skipped for each reason."""
        skipped = (each.cause for each in self.results if each.outcome is CheckOutcome.SKIPPED)
        return Counter(SkipKind.read(cause)[1] for cause in skipped)

    def to_engine(self) -> dict[str, Any]:
        """The engine's part of the JSON document."""
        counts = Counter(each.outcome for each in self.results)
        return {
            "engine": self.row.name,
            "result": self.verdict,
            "counts": {str(each): counts[each] for each in CheckOutcome},
            "skipped": dict(self.reasons().most_common()),
            "failed": [{"id": each.id, "cause": each.cause} for each in self.failed],
            "problem": self.problem,
        }


def check_engines(
    request: SuiteRequest,
    engines: Sequence[str],
    left_out: Mapping[str, object],
    *,
    timeout: float,
    jobs: int | None,
    memory: int | None,
    show_ids: bool,
    as_json: bool,
    verbose: bool,
) -> int:
    """Run the checks through each engine, print the table or the JSON document, and return the exit code.

    Args:
        request: the backend, and the patterns of the checks in `only`.
        engines: texts of `--engine`.
        left_out: by name the options that a run through engines does not have; those with a value are refused.
        timeout: seconds of a check.
        jobs: worker processes.
        memory: bytes of a worker.
        show_ids: print the ids, and run none.
        as_json: print JSON.
        verbose: show each check.
    """
    for option, value in left_out.items():
        if value:
            raise PolicyError(
                option, value, "is left out with --engine, whose results are not of the backend"
            )
    reports = [EngineReport(row, verbose, err=as_json) for row in read_engines(engines)]
    listing: Listing | None = None
    listed: list[str] = []
    for report in reports:
        if report.problem:
            continue
        found = _listed(request, report)
        if found is not None:
            listing, ids = found
            if show_ids:
                listed += [f"{report.row.name} {check}" for check in ids]
            else:
                _run(listing, ids, report, timeout, jobs, memory)
    if show_ids and as_json:
        print_json({"backend": request.name, "checks": listed}, "attnplug.checks")
    elif show_ids:
        echo("\n".join(listed))
    if show_ids:
        return 0 if listed else _FAILED
    if as_json:
        device = None if listing is None else listing.device
        about = {"backend": request.name if listing is None else listing.name, "device": device}
        engines_json = [report.to_engine() for report in reports]
        print_json({**about, "level": request.level, "engines": engines_json}, "attnplug.engines")
    else:
        console().print(_table(reports))
    return 0 if {report.verdict for report in reports} in ({"passed"}, {"passed", "skipped"}) else _FAILED


def _listed(request: SuiteRequest, report: EngineReport) -> tuple[Listing, list[str]] | None:
    """The listing of an engine's checks and the wanted ids; None if they cannot be listed, which the report keeps."""
    from attnplug.testing.conformance.check_filter import matching
    from attnplug.testing.isolation.listing import ListingFailure, list_checks

    asked = dataclasses.replace(request, checks_of=report.row.checks_of, only=("*",))
    with interrupt_on_sigterm(), report.waiting(f"listing the checks of {request.name} in {report.row.name}"):
        listing = list_checks(asked, _LISTING_SECONDS)
    if isinstance(listing, ListingFailure):
        if listing.usage and "names no function" not in listing.text:
            raise CommandError(listing.text, 2)
        report.problem = listing.text
        return None
    return listing, matching(listing.ids, request.only, "--only")


def _run(
    listing: Listing,
    ids: list[str],
    report: EngineReport,
    timeout: float,
    jobs: int | None,
    memory: int | None,
) -> None:
    from attnplug.testing.isolation.run import Limits, run_checks

    limits = Limits.here(listing.device_type, len(ids), timeout, jobs, memory)
    report.begin(listing, ids, {}, limits, None)
    try:
        with report.bar(), interrupt_on_sigterm():
            report.problem = run_checks(listing, ids, limits, report)
    except KeyboardInterrupt:
        report.say(f"interrupted: {report.row.name} was not finished")
        raise typer.Exit(_INTERRUPTED) from None
    report.end(ids, report.problem)
    report.tell("")


def _table(reports: Sequence[EngineReport]) -> WrappedTable:
    """A row for each engine: the counts of its checks, and why some were skipped."""
    numbers = ["checks passed", "failed", "skipped"]
    table = WrappedTable(["engine", "result", *numbers, "reasons of skips"], right=numbers)
    for report in reports:
        counts = Counter(each.outcome for each in report.results)
        cells = [counts[each] for each in (CheckOutcome.PASSED, CheckOutcome.FAILED, CheckOutcome.SKIPPED)]
        # Each reason begins with the engine's name, which the row has.
        front = f"{report.row.name}: "
        reasons = [f"{count} {why.removeprefix(front)}" for why, count in report.reasons().most_common()]
        why = report.problem or "; ".join(reasons)
        table.add_row(report.row.name, verdict(report.verdict), *map(str, cells), why)
    return table
