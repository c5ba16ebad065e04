"""The cells that `attnplug matrix --verify` runs: backend after backend, written as they come."""

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

__all__ = ["How", "ended_once", "run_cells"]

_FAILED, _REFUTED, _INTERRUPTED = 1, 4, 130
_AT_ONCE = 1.0
"""Seconds within which signals to end are one."""


@dataclasses.dataclass(frozen=True, slots=True)
class How:
    """How cells are run, as the options have it."""

    extent: Extent
    resume: bool
    jobs: int | None
    timeout: float
    memory: int | None


def run_cells(
    pairs: Sequence[Pair], declared: Sequence[Run], how: How, outputs: Outputs, verbose: bool
) -> tuple[int, list[str]]:
    """Run the cells and write what is found; the exit code, and why of some backends nothing, or not all, could be run."""
    pending = [
        Verification(run, pair.offer, pair.device, name=pair.name, asked=pair.asked, extent=how.extent)
        for pair, run in zip(pairs, declared, strict=True)
    ]

    def found() -> Matrix:
        return Matrix(tuple(each.outcome() for each in pending))

    # What is known is written now and then: nothing else survives SIGKILL.
    report = MatrixReport(verbose, lambda: outputs.write_json(found()))
    cannot: list[str] = []
    interrupted = False
    try:
        for pair, verification in zip(pairs, pending, strict=True):
            why = _run_one(pair, verification, how, report)
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
    _remember(matrix, report)
    return _INTERRUPTED if interrupted else _REFUTED if refuted else 0, cannot


def _run_one(pair: Pair, verification: Verification, how: How, report: MatrixReport) -> str | None:
    """Run one backend's cells; why nothing, or not all, could be run."""
    from attnplug.testing.isolation.run import Limits, default_jobs, worker_memory

    if not verification.ids:
        report.end(str(pair), verification.outcome())
        return None
    with report.waiting(f"looking for {pair}"):
        why = verification.prepare(resume=how.resume)
    if why is not None:
        report.end(str(pair), verification.outcome())
        return why
    cells, kind = len(verification.rest), pair.device.type
    count = min(how.jobs, max(cells, 1)) if how.jobs else default_jobs(kind, cells)
    limits = Limits(how.timeout, count, how.memory or worker_memory(kind, count))
    problem = None
    try:
        with report.running(str(pair), verification, limits):
            problem = verification.run(limits, report)
    finally:
        report.end(str(pair), verification.outcome(), problem)
    return None if problem is None else f"the run of {pair} stopped: {problem.splitlines()[0]}"


def _remember(found: Matrix, report: MatrixReport) -> None:
    """Tell the selector what was refuted, and what no longer is."""
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
def ended_once() -> Iterator[None]:
    """SIGTERM is an interrupt as SIGINT is, and several at once are one.

    coreutils' timeout sends its signal to us, and then to our process group; the second must not keep us from
    writing what is known.
    """
    last = -_AT_ONCE

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _AT_ONCE:
            last = now
            raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
