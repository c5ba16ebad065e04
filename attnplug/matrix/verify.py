"""Runs cells on this machine: claims become verified, refuted, or not run with the reason."""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

from attnplug.matrix.axes import spec_of
from attnplug.matrix.model import Cell, Finding, Run, Status
from attnplug.testing.design.search import compile_key, most_adding
from attnplug.testing.isolation.listing import Listing, ListingFailure, SuiteRequest, list_checks, versions
from attnplug.testing.isolation.results import CheckObserver, CheckOutcome, Result, SavedResults
from attnplug.testing.isolation.run import Limits, run_checks

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.registry.plugins.records import Offer

INTERRUPTED = "interrupted"
"""The reason of cells that had not run when the user stopped the run."""

_CHECKS = "attnplug.matrix.cell_checks:cell_checks"
_LISTING_SECONDS = 300.0
# Causes that come from the limits, from a signal to a worker, or from this machine, not from the backend.
_NO_VERDICT = re.compile(
    r"timed out after |.*\bout of memory\b|.* crashed: SIG(TERM|INT|HUP)\b|[\w.]*BackendUnavailableError: ",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True, slots=True)
class RunScope:
    """The part of the cells to run."""

    unclaimed: bool = False
    """Whether refused cells are run too."""
    compile_limit: int | None = None
    """The number of compile keys to run, those with most cells; None for all."""


class Verification:
    """The cells of one backend on one device of this machine, run in workers.

    It observes the run, so that `outcome` has the results whenever the run ends.

    Args:
        declared: the cells and the backend's declarations.
        offer: the backend; `name` is how workers find it.
        device: of this machine.
        name: the backend, in the form of `attnplug.select`.
        asked: the device, in the user's words; None for the current one.
        extent: the part of the cells to run.
        checks_of: "module:function" that lists a check for each cell, under its id.
    """

    def __init__(
        self,
        declared: Run,
        offer: Offer,
        device: Device,
        *,
        name: str,
        asked: str | None = None,
        extent: RunScope | None = None,
        checks_of: str = _CHECKS,
    ) -> None:
        self._declared = declared
        self._offer = offer
        self._device = device
        self._request = SuiteRequest(name, asked, checks_of=checks_of)
        self._listing: Listing | None = None
        self._saved: SavedResults | None = None
        self._observer: CheckObserver | None = None
        self.results: dict[str, Result] = {}
        """The results so far by cell, with those of an earlier run."""
        self._why_not: dict[str, str] = {}
        self._findings = {each.cell.id: each for each in declared.findings}
        self.compile_keys = 0
        """The number of compile keys of the cells to run."""
        self.ids = self._choose(extent or RunScope())
        """The cells to run, those of one compile key together, the largest such group first."""

    def prepare(self, *, resume: bool = False) -> str | None:
        """Load the backend in a child process, and with `resume` the results of an earlier run.

        Returns:
            Why nothing can be run, else None.
        """
        listing = list_checks(self._request, _LISTING_SECONDS)
        if isinstance(listing, ListingFailure):
            self._leave_out(self.ids, listing.text)
            self.ids = []
            return listing.text
        self._listing = listing
        self._saved = SavedResults(listing)
        if resume:
            known = self._saved.reusable({})
            self.results = {each: known[each] for each in self.ids if each in known}
        return None

    @property
    def remaining(self) -> list[str]:
        """The cells without a result."""
        return [each for each in self.ids if each not in self.results]

    def run(self, limits: Limits, observer: CheckObserver) -> str | None:
        """Run the rest of the cells and tell `observer` of each.

        Returns:
            Why the run itself stopped, if it did.

        Raises:
            KeyboardInterrupt: the user's; the workers have ended, and `outcome` has the results.
        """
        if self._listing is None or self._saved is None:
            raise RuntimeError("Verification.run needs a successful Verification.prepare first")
        if not (ids := self.remaining):
            return None
        self._observer = observer
        self._saved.remove(ids)
        problem = run_checks(self._listing, ids, limits, self)
        self._leave_out(self.remaining, f"no result came: {problem}" if problem else "no result came")
        return problem

    def started(self, check_id: str) -> None:
        """A worker starts a cell."""
        if self._observer is not None:
            self._observer.started(check_id)

    def finished(self, result: Result) -> None:
        """A cell ended; if it ends twice, the failure counts."""
        # A teardown may fail after the call passed, and that failure must not be lost.
        if result.id in self.results and result.outcome is not CheckOutcome.FAILED:
            return
        self.results[result.id] = result
        if self._saved is not None:
            self._saved.add(result)
        if self._observer is not None:
            self._observer.finished(result)

    def status_of(self, result: Result) -> Status:
        """The status that a result gives its cell."""
        return _update(self._findings[result.id], result).status

    def outcome(self) -> Run:
        """The findings so far; cells without a result are not run, because of the interrupt."""
        return dataclasses.replace(
            self._declared,
            device_name=self._device.name,
            versions=versions(self._offer),
            date=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            findings=tuple(self._finding(each) for each in self._declared.findings),
        )

    def _finding(self, declared: Finding) -> Finding:
        result = self.results.get(declared.cell.id)
        if result is not None:
            return _update(declared, result)
        if declared.status is not Status.DECLARED:
            return declared
        return Finding(declared.cell, Status.NOT_RUN, (self._why_not.get(declared.cell.id, INTERRUPTED),))

    def _choose(self, extent: RunScope) -> list[str]:
        statuses = {Status.DECLARED, Status.REFUSED} if extent.unclaimed else {Status.DECLARED}
        claimed = {each.cell for each in self._declared.findings if each.status is Status.DECLARED}
        groups: dict[Hashable | None, list[Cell]] = {}
        for cell in (each.cell for each in self._declared.findings if each.status in statuses):
            groups.setdefault(compile_key(self._offer.backend, spec_of(cell)), []).append(cell)
        # Cells without a compile key cost no compilation, so the limit does not apply to them.
        uncompiled = groups.pop(None, [])
        # Only claimed cells count, so unclaimed ones do not use up the limit of compilations.
        keys = most_adding({key: claimed.intersection(group) for key, group in groups.items()})
        within = keys[: extent.compile_limit]
        self.compile_keys = len(within)
        beyond = keys[len(within) :]
        why = f"compiles for one of {len(beyond)} keys beyond the limit of {extent.compile_limit}"
        self._leave_out((cell.id for key in beyond for cell in groups[key]), why)
        return [cell.id for group in (*(groups[key] for key in within), uncompiled) for cell in group]

    def _leave_out(self, ids: Iterable[str], why: str) -> None:
        self._why_not.update(dict.fromkeys(ids, why))


def _update(declared: Finding, result: Result) -> Finding:
    """The declaration, updated by a result."""
    passed = result.outcome is CheckOutcome.PASSED
    # A refused cell made no claim, so its failure refutes nothing.
    if declared.status is Status.REFUSED:
        return dataclasses.replace(declared, status=Status.UNCLAIMED) if passed else declared
    if passed:
        return Finding(declared.cell, Status.VERIFIED)
    # The first line names the mistake; the others help an author of the backend.
    why = result.cause.partition("\n")[0] or "it failed and did not say why"
    # Lack of time or memory, or a missing library, says nothing about the numbers.
    no_verdict = result.outcome is CheckOutcome.SKIPPED or _NO_VERDICT.match(why)
    return Finding(declared.cell, Status.NOT_RUN if no_verdict else Status.REFUTED, (why,))
