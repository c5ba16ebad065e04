"""`attnplug matrix --verify`: runs the cells of one backend after another and saves their results."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from attnplug.cli.matrix_files import Outputs, show
from attnplug.cli.matrix_report import MatrixReport
from attnplug.cli.output import error
from attnplug.core.errors import MatrixFileError
from attnplug.matrix.model import Matrix, Run, Status
from attnplug.matrix.verify import Extent, Verification

if TYPE_CHECKING:
    from attnplug.cli.matrix_cells import Pair

_FAILED, _REFUTED, _INTERRUPTED = 1, 4, 130
_SAME_SIGNAL_SECONDS = 1.0
"""Several signals within this time count as one."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunOptions:
    """The command-line options of a run."""

    extent: Extent
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
    report = MatrixReport(verbose, lambda: outputs.write_json(found()))
    cannot: list[str] = []
    interrupted = False
    try:
        for pair, verification in zip(pairs, pending, strict=True):
            why = _run_one(pair, verification, options, report)
            cannot += [why] if why else []
    except KeyboardInterrupt:
        interrupted = True
    matrix = found()
    outputs.write(matrix)
    report.say("")
    show(matrix)
    if interrupted:
        report.say("interrupted; the same command with --resume goes on from here")
    refuted = sum(each.status is Status.REFUTED for run in matrix.runs for each in run.findings)
    _record_refuted(matrix, report)
    return _INTERRUPTED if interrupted else _REFUTED if refuted else 0, cannot


def _run_one(pair: Pair, verification: Verification, options: RunOptions, report: MatrixReport) -> str | None:
    """Run the cells of one backend; gives the reason if some could not be run."""
    from attnplug.testing.isolation.run import Limits

    if not verification.ids:
        report.end(str(pair), verification.outcome())
        return None
    with report.waiting(f"looking for {pair}"):
        why = verification.prepare(resume=options.resume)
    if why is not None:
        report.end(str(pair), verification.outcome())
        return why
    limits = Limits.here(
        pair.device.type, len(verification.rest), options.timeout, options.jobs, options.memory
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
    from attnplug.registry.refuted import record

    for run in found.runs:
        try:
            recorded = record(run_to_dict(run))
        except MatrixFileError as problem:
            error(f"attnplug select is not told what was refuted: {problem}", _FAILED)
            return
        about = f"{run.backend} on {run.device}"
        if recorded.refuted:
            report.say(f"{about}: attnplug select refuses what was refuted ({recorded.path})")
        if recorded.cleared:
            report.say(f"{about}: {recorded.cleared} refuted before and right now, no longer refused")


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """SIGTERM interrupts as SIGINT does, and several signals at once are one interrupt.

    coreutils' timeout sends its signal to this process, and then to its process group. The second signal must not stop
    the first one's handling, which writes the results.
    """
    last = -_SAME_SIGNAL_SECONDS

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SAME_SIGNAL_SECONDS:
            last = now
            raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
