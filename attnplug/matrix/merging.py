"""Joins the matrices of several machines, or of several days."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Sequence

from attnplug.matrix.model import Finding, Matrix, Run, Status

_EVIDENCE = {Status.VERIFIED, Status.REFUTED, Status.UNCLAIMED}


def merge(matrices: Sequence[Matrix], say: Callable[[str], None] | None = None) -> Matrix:
    """One run for each backend and device, in order of first appearance.

    Runs of the same versions on the same kind of device are joined cell by cell. A cell with evidence
    replaces one without, then the newer replaces the older. For other versions, only the newest run with
    evidence is kept.

    Args:
        matrices: to join.
        say: called with a sentence for each run left out and each cell on which two runs disagree.
    """
    tell = say or (lambda sentence: None)
    by_key: dict[tuple[str, str], list[Run]] = {}
    for run in (run for matrix in matrices for run in matrix.runs):
        by_key.setdefault(run.key, []).append(run)
    return Matrix(tuple(_one(runs, tell) for runs in by_key.values()))


def with_name(matrix: Matrix, name: str) -> Matrix:
    """The matrix with `name` added to its devices, such as "cpu (torch-2.9)".

    `merge` then keeps runs of several versions apart. The matrix is for people only: `attnplug.select` refuses
    such device names.
    """
    return Matrix(tuple(dataclasses.replace(run, device=f"{run.device} ({name})") for run in matrix.runs))


def _one(runs: Sequence[Run], tell: Callable[[str], None]) -> Run:
    """The runs of one backend on one device as one."""
    # The sort is stable: with equal dates the later file wins.
    ordered = sorted(runs, key=lambda run: (_has_evidence(run), _date(run)))
    best = ordered[-1]
    same = [run for run in ordered if _subject(run) == _subject(best)]
    for run in ordered:
        if run not in same and (_has_evidence(run) or not _has_evidence(best)):
            tell(f"{_named(run)} is left out for {_named(best)}{_difference(run, best)}")
    commits = [run.commit[:12] if run.commit else "no commit" for run in same if _has_evidence(run)]
    if len(set(commits)) > 1:
        tell(f"{best.backend} on {best.device}: cells of {', '.join(dict.fromkeys(commits))} are joined")
    found: dict[str, tuple[Run, Finding]] = {}
    for run in sorted(same, key=_date):
        for finding in run.findings:
            before = found.get(finding.cell.id)
            found[finding.cell.id] = (
                (run, finding) if before is None else _better(before, (run, finding), tell)
            )
    # The cells of the best run come first, then those that only other runs have.
    order = dict.fromkeys(each.cell.id for run in (best, *reversed(same)) for each in run.findings)
    newest = max(same, key=_date)
    findings = tuple(found[cell][1] for cell in order)
    axes = next((run.axes for run in sorted(same, key=_date, reverse=True) if run.axes is not None), None)
    return dataclasses.replace(newest, findings=findings, axes=axes)


def _better(
    old: tuple[Run, Finding], new: tuple[Run, Finding], tell: Callable[[str], None]
) -> tuple[Run, Finding]:
    """The newer of two findings on one cell, or the older if only that has evidence."""
    before, now = old[1].status, new[1].status
    if before in _EVIDENCE and now not in _EVIDENCE:
        return old
    if before in _EVIDENCE and before is not now:
        where = f"{new[0].backend} on {new[0].device}"
        tell(f"{where}: {new[1].cell.id} was {before} on {old[0].date}, and is {now} on {new[0].date}")
    return new


def _subject(run: Run) -> tuple[object, ...]:
    """The fields that must be equal to join cells."""
    return run.distribution, run.version, run.device_name, tuple(sorted(run.versions.items()))


def _has_evidence(run: Run) -> bool:
    return any(finding.status in _EVIDENCE for finding in run.findings)


def _date(run: Run) -> dt.datetime:
    return dt.datetime.fromisoformat(run.date)


def _named(run: Run) -> str:
    return f"{run.backend} on {run.device} of {run.date}"


def _difference(run: Run, best: Run) -> str:
    """The first difference of two runs: "; torch 2.12.0 is not 2.13.0"."""
    if run.device_name != best.device_name:
        return f"; {run.device_name or 'an unnamed device'} is not {best.device_name or 'an unnamed device'}"
    mine = {"version": run.version or "none", **run.versions}
    other = {"version": best.version or "none", **best.versions}
    for name in dict.fromkeys([*mine, *other]):
        if mine.get(name) != other.get(name):
            return f"; {name} {mine.get(name, 'missing')} is not {other.get(name, 'missing')}"
    return f"; {run.distribution} is not {best.distribution}"
