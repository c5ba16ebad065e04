"""`attnplug matrix --verify`: runs the cells of one backend after another and saves their results."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from attnplug.cli.commands.matrix_files import Outputs, show
from attnplug.cli.output.output import error
from attnplug.cli.output.run_report import CAUSE_LINES, RunReport, counted, counts_in_words
from attnplug.core.errors import MatrixFileError
from attnplug.matrix.model import Matrix, Run, Status
from attnplug.matrix.verify import RunScope, Verification
from attnplug.testing.isolation.results import Result
from attnplug.testing.isolation.run import Limits

if TYPE_CHECKING:
    from attnplug.cli.commands.matrix import Pair

_FAILED, _REFUTED, _INTERRUPTED = 1, 4, 130
_SECONDS = 30.0
"""Seconds between two saves, and without a bar between two lines of progress."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunOptions:
    """The command-line options of a run."""

    extent: RunScope
    resume: bool
    jobs: int | None
    timeout: float
    memory: int | None


def run_cells(
    pairs: Sequence[Pair], declared: Sequence[Run], options: RunOptions, outputs: Outputs, verbose: bool
) -> tuple[int, list[str]]:
    """Run the cells and write the results; gives the exit code and the reasons of cells that could not be run."""
    pending = [
        Verification(run, pair.offer, pair.device, name=pair.name, asked=pair.asked, extent=options.extent)
        for pair, run in zip(pairs, declared, strict=True)
    ]

    def found() -> Matrix:
        return Matrix(tuple(each.outcome() for each in pending))

    # The report writes the results regularly, because only files survive SIGKILL.
    report = MatrixReport(verbose, lambda: outputs.save_json(found()), err=outputs.to_stdout)
    cannot: list[str] = []
    interrupted = False
    try:
        for pair, verification in zip(pairs, pending, strict=True):
            why = _run_one(pair, verification, options, report)
            cannot += [why] if why else []
    except KeyboardInterrupt:
        interrupted = True
    matrix = found()
    outputs.write(matrix, with_models=True)
    report.tell("")
    if not outputs.to_stdout:
        show(matrix)
    if interrupted:
        report.say("interrupted; run the same command with --resume to continue")
    refuted = sum(each.status is Status.REFUTED for run in matrix.runs for each in run.findings)
    # After the files are written, so that a fault in the evidence file loses no results.
    _record_refuted(matrix, report)
    return _INTERRUPTED if interrupted else _REFUTED if refuted else 0, cannot


class MatrixReport(RunReport):
    """Prints the runs of one backend after another.

    Args:
        verbose: print every cell.
        save: writes the results so far; called every 30 seconds.
        err: print to standard error.
    """

    def __init__(self, verbose: bool, save: Callable[[], None], *, err: bool = False) -> None:
        super().__init__(verbose, err=err)
        self._save = save
        self._status_of: Callable[[Result], Status] = lambda result: Status.NOT_RUN
        self._told = self._saved = self._start

    @contextlib.contextmanager
    def running(self, what: str, verification: Verification, limits: Limits) -> Iterator[None]:
        """Print the number of cells and workers, then show progress during the run."""
        self._status_of = verification.status_of
        self._verdicts = {each: self._status_of(result) for each, result in verification.results.items()}
        self._under_way = {}
        self._total, self._kept = len(verification.ids), len(self._verdicts)
        self._start = self._told = time.monotonic()
        parts = [counted(self._total, "cell"), counted(limits.jobs, "worker")]
        parts += [counted(verification.compile_keys, "compile key")] if verification.compile_keys else []
        parts += [f"{len(self._verdicts)} kept from the run before"] if self._verdicts else []
        self.tell(f"{what}: {', '.join(parts)}")
        with self.bar():
            yield

    def finished(self, result: Result) -> None:
        """A cell ended."""
        status = self._verdicts[result.id] = self._status_of(result)
        self._under_way.pop(result.id, None)
        if self._verbose or (status is Status.REFUTED and not self._quiet):
            style = "red" if status is Status.REFUTED else None
            self._say_verdict(status, 9, result.id, result.seconds, style)
            # The tables that follow have the whole evidence.
            for line in result.cause.splitlines()[:CAUSE_LINES] if self._verbose else ():
                self.say(f"          {line}")
        self._tell_how_far()
        if time.monotonic() - self._saved > _SECONDS:
            try:
                self._save()
            except MatrixFileError as problem:
                # The run goes on: its end writes the file, or says that it cannot.
                self.say(str(problem))
            self._saved = time.monotonic()

    def end(self, what: str, run: Run, problem: str | None = None) -> None:
        """Sum up one backend."""
        words = counts_in_words(Counter(finding.status for finding in run.findings)) or "no cells"
        self.tell(f"{what}: {words} in {time.monotonic() - self._start:.0f} s")
        not_run = [each for each in run.findings if each.status is Status.NOT_RUN and each.why]
        why = Counter(finding.why[0] for finding in not_run)
        for text, number in why.most_common(CAUSE_LINES):
            self.tell(f"  {number} not run: {text.splitlines()[0]}")
        if len(why) > CAUSE_LINES:
            self.tell(f"  ... and {counted(len(why) - CAUSE_LINES, 'other reason')}")
        if problem:
            self.say(f"the run stopped:\n{problem}")

    def _tell_how_far(self) -> None:
        """Move the bar; without one, print a line every 30 seconds."""
        super()._tell_how_far()
        if not self._live and time.monotonic() - self._told > _SECONDS:
            self._told = time.monotonic()
            self.tell(f"  {len(self._verdicts)} of {self._total}: {self._counts()}{self._time_left()}")


def _run_one(pair: Pair, verification: Verification, options: RunOptions, report: MatrixReport) -> str | None:
    """Run the cells of one backend; gives the reason if some could not be run."""
    if not verification.ids:
        report.end(str(pair), verification.outcome())
        return None
    with report.waiting(f"looking for {pair}"):
        why = verification.prepare(resume=options.resume)
    if why is not None:
        report.end(str(pair), verification.outcome())
        return why
    limits = Limits.here(
        pair.device.type, len(verification.remaining), options.timeout, options.jobs, options.memory
    )
    problem = None
    try:
        with report.running(str(pair), verification, limits):
            problem = verification.run(limits, report)
    finally:
        report.end(str(pair), verification.outcome(), problem)
    return None if problem is None else f"the run of {pair} stopped: {problem.splitlines()[0]}"


def _record_refuted(found: Matrix, report: MatrixReport) -> None:
    """Store the refuted cells for the selector, and remove those that are verified now."""
    from attnplug.matrix.results import run_to_dict
    from attnplug.registry.selection.evidence import record

    for run in found.runs:
        try:
            recorded = record(run_to_dict(run))
        except MatrixFileError as problem:
            error(f"attnplug select will not refuse these cells: {problem}", _FAILED)
            # All runs go to one file, so the next one would fail too.
            return
        about = f"{run.backend} on {run.device}"
        if recorded.refuted:
            report.tell(f"{about}: attnplug select refuses what was refuted ({recorded.path})")
        if recorded.cleared:
            report.tell(f"{about}: {recorded.cleared} refuted before and right now, no longer refused")
