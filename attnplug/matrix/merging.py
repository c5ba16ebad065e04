"""Joins the matrices of several machines, or of several days.

The differences of two matrices, and whether a claim was lost.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from attnplug.matrix.model import CLAIMED, Finding, Matrix, Run, Status

_EVIDENCE = {Status.VERIFIED, Status.REFUTED, Status.UNCLAIMED}
_RANK = {Status.COMPILED: 1, **dict.fromkeys(_EVIDENCE, 2)}
"""What is run counts more than what is compiled, and that more than a claim."""
TRIED = frozenset({*_RANK, Status.NOT_RUN})
"""The statuses of the cells that a run has tried, or that are compiled."""


def merge(matrices: Sequence[Matrix], say: Callable[[str], None] | None = None) -> Matrix:
    """One run for each backend and device, in order of first appearance.

    Runs of the same versions on the same kind of device are joined cell by cell. A cell with evidence
    replaces one without, a compiled cell a declared one, then the newer replaces the older. For other versions,
    only the newest run with evidence is kept.

    Args:
        matrices: to join.
        say: called with a sentence for each run left out and each cell on which two runs disagree.
    """
    tell = say or (lambda sentence: None)
    by_key: dict[tuple[str, str], list[Run]] = {}
    for run in (run for matrix in matrices for run in matrix.runs):
        by_key.setdefault(run.key, []).append(run)
    return Matrix(tuple(_one(runs, tell) for runs in by_key.values()))


def join(matrices: Sequence[Matrix], say: Callable[[str], None] | None = None) -> Matrix:
    """As `merge`, with the cells of other cards and of other versions of libraries, each with its source.

    For people only: `attnplug.select` and files have the evidence of one card with one set of versions. The run with
    the most evidence gives the joined run its card, versions, date and claims. Cells that other runs of the
    same version of the backend tried join it. The newer counts, but a cell that was wrong on one card stays wrong.

    Args:
        matrices: to join.
        say: as for `merge`.
    """
    tell = say or (lambda sentence: None)
    by_subject: dict[tuple[object, ...], list[Matrix]] = {}
    for run in (run for matrix in matrices for run in matrix.runs):
        by_subject.setdefault((run.key, *_subject(run)), []).append(Matrix((run,)))
    by_key: dict[tuple[str, str], list[Run]] = {}
    for alike in by_subject.values():
        (one,) = merge(alike, say).runs
        by_key.setdefault(one.key, []).append(one)
    return Matrix(tuple(_with_sources(runs, tell) for runs in by_key.values()))


def with_name(matrix: Matrix, name: str) -> Matrix:
    """The matrix with `name` added to its devices, such as "cpu (torch-2.9)".

    `merge` then keeps runs of several versions apart. The matrix is for people only: `attnplug.select` refuses
    such device names.
    """
    return Matrix(tuple(dataclasses.replace(run, device=f"{run.device} ({name})") for run in matrix.runs))


def _one(runs: Sequence[Run], tell: Callable[[str], None]) -> Run:
    """The runs of one backend on one device as one."""
    best, same = _alike(runs, _subject, tell)
    commits = [run.commit[:12] if run.commit else "no commit" for run in same if _has_evidence(run)]
    if len(set(commits)) > 1:
        tell(f"{best.backend} on {best.device}: cells of {', '.join(dict.fromkeys(commits))} are joined")
    newest = max(same, key=_date)
    findings = tuple(finding for _, finding in _cells(best, same, tell))
    kernels = {each.key: each for run in sorted(same, key=_date) for each in run.kernels}
    return dataclasses.replace(
        newest, findings=findings, axes=_newest_axes(same), kernels=tuple(kernels.values())
    )


def _with_sources(runs: Sequence[Run], tell: Callable[[str], None]) -> Run:
    """The runs of one backend on one device, each of other subjects, as one."""
    _, same = _alike(runs, lambda run: (run.distribution, run.version), tell)
    main = max(same, key=lambda run: (_count(run, _EVIDENCE), _count(run, TRIED), _date(run)))
    # What was run comes before what was compiled, the newest first.
    others = [run for run in reversed(same) if run is not main]
    # A claim is no evidence, so those of other runs say nothing here.
    tried = [
        dataclasses.replace(run, findings=tuple(each for each in run.findings if each.status in TRIED))
        for run in others
    ]
    cells = _cells(main, [main, *tried], tell)
    sources = [run for run in tried if any(source is run for source, _ in cells)]
    place = {id(run): number for number, run in enumerate(sources)}
    return dataclasses.replace(
        main,
        findings=tuple(dataclasses.replace(each, source=place.get(id(run))) for run, each in cells),
        axes=_newest_axes(same),
        sources=tuple(dataclasses.replace(run, findings=(), axes=None) for run in sources),
    )


def _alike(
    runs: Sequence[Run], subject: Callable[[Run], object], tell: Callable[[str], None]
) -> tuple[Run, list[Run]]:
    """The best run, and the runs with its subject, the best last."""
    # The sort is stable: with equal dates the later file wins.
    ordered = sorted(runs, key=lambda run: (_has_evidence(run), bool(run.kernels), _date(run)))
    best = ordered[-1]
    same = [run for run in ordered if subject(run) == subject(best)]
    for run in ordered:
        if run not in same and (_has_evidence(run) or not _has_evidence(best)):
            tell(f"{_name(run)} is left out for {_name(best)}{_difference(run, best)}")
    return best, same


def _cells(first: Run, runs: Sequence[Run], tell: Callable[[str], None]) -> list[tuple[Run, Finding]]:
    """The finding that counts of each cell, with its run: the cells of `first`, then those that only others have."""
    by_cell: dict[str, dict[str | None, tuple[Run, Finding]]] = {}
    for run in sorted(runs, key=_date):
        for finding in run.findings:
            # First by card: what another card found later says nothing about a card where a cell was wrong.
            cards, card, new = by_cell.setdefault(finding.cell.id, {}), run.device_name, (run, finding)
            cards[card] = _better(cards[card], new, tell) if card in cards else new
    found: dict[str, tuple[Run, Finding]] = {}
    for cell, cards in by_cell.items():
        ordered = sorted(cards.values(), key=lambda each: _date(each[0]))
        found[cell] = functools.reduce(lambda old, new: _better(old, new, tell), ordered)
    order = dict.fromkeys(each.cell.id for run in (first, *reversed(runs)) for each in run.findings)
    return [found[cell] for cell in order]


def _newest_axes(runs: Sequence[Run]) -> Mapping[str, tuple[str | int | None, ...]] | None:
    return next((run.axes for run in sorted(runs, key=_date, reverse=True) if run.axes is not None), None)


def _better(
    old: tuple[Run, Finding], new: tuple[Run, Finding], tell: Callable[[str], None]
) -> tuple[Run, Finding]:
    """The newer of two findings on one cell, or the older if only that has evidence, or is wrong on another card."""
    before, now = old[1].status, new[1].status
    if _RANK.get(before, 0) > _RANK.get(now, 0):
        return old
    if before is Status.REFUTED and now is not before and old[0].device_name != new[0].device_name:
        where = f"{new[0].backend} on {new[0].device}"
        tell(
            f"{where}: {new[1].cell.id} was refuted on {old[0].device_name}, and is {now} on {new[0].device_name}"
        )
        return old
    if before in _EVIDENCE and before is not now:
        where = f"{new[0].backend} on {new[0].device}"
        tell(f"{where}: {new[1].cell.id} was {before} on {old[0].date}, and is {now} on {new[0].date}")
    return new


def _subject(run: Run) -> tuple[object, ...]:
    """The fields that must be equal to join cells."""
    return run.distribution, run.version, run.device_name, tuple(sorted(run.versions.items()))


def _has_evidence(run: Run) -> bool:
    return _count(run, _EVIDENCE) > 0


def _count(run: Run, statuses: Collection[Status]) -> int:
    return sum(finding.status in statuses for finding in run.findings)


def _date(run: Run) -> dt.datetime:
    return dt.datetime.fromisoformat(run.date)


def _name(run: Run) -> str:
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


class ChangeKind(enum.StrEnum):
    """The kind of a change; the gravest comes first."""

    REFUTED = "now refuted"
    """Claimed, and not refuted before."""
    WITHDRAWN = "no longer claimed"
    """Claimed before, refused now."""
    VANISHED = "vanished"
    """Claimed before; the cell is gone."""
    UNKNOWN = "no longer run"
    """Run before; still claimed."""
    VERIFIED = "now verified"
    """Claimed, and verified for the first time."""
    CLAIMED = "newly claimed"
    """Refused before."""
    ADDED = "new"
    """The cell is new."""
    DROPPED = "no longer asked"
    """Not claimed before; the cell is gone."""
    REASONS = "other reasons"
    """The same status, for other reasons."""

    @property
    def is_loss(self) -> bool:
        """Whether users lose something that they could rely on."""
        return self in (ChangeKind.REFUTED, ChangeKind.WITHDRAWN, ChangeKind.VANISHED)


@dataclasses.dataclass(frozen=True, slots=True)
class CellChange:
    """A cell, by its id, that changed.

    The status before, `old`, is None for a new cell; that now, `new`, is None for a cell that is gone. `why` has
    the reasons or the evidence now.
    """

    backend: str
    device: str
    cell: str
    kind: ChangeKind
    old: Status | None
    new: Status | None
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = f"{self.backend} on {self.device}: {self.cell} {self.kind}"
        before = f" (was {self.old})" if self.old is not None and self.new is not None else ""
        return said + before + (f": {'; '.join(self.why)}" if self.why else "")


def changes(old: Matrix, new: Matrix) -> list[CellChange]:
    """All cells that changed: the gravest changes first, then in the order of the matrices."""
    before = {run.key: run for run in old.runs}
    after = {run.key: run for run in new.runs}
    found = [
        change
        for key in dict.fromkeys([*before, *after])
        for change in _of_run(key, before.get(key), after.get(key))
    ]
    order = list(ChangeKind)
    return sorted(found, key=lambda change: order.index(change.kind))


def _of_run(key: tuple[str, str], old: Run | None, new: Run | None) -> Iterator[CellChange]:
    before, after = ({each.cell.id: each for each in (run.findings if run else ())} for run in (old, new))
    for cell in dict.fromkeys([*before, *after]):
        was, now = before.get(cell), after.get(cell)
        kind = _kind(was, now)
        if kind is not None:
            then, today = (None if each is None else each.status for each in (was, now))
            yield CellChange(*key, cell, kind, then, today, now.why if now else ())


def _kind(was: Finding | None, now: Finding | None) -> ChangeKind | None:
    if was is None or now is None:
        if now is not None:
            return ChangeKind.REFUTED if now.status is Status.REFUTED else ChangeKind.ADDED
        return ChangeKind.VANISHED if was is not None and was.status in CLAIMED else ChangeKind.DROPPED
    if was.status is now.status:
        return (
            ChangeKind.REASONS
            if was.why != now.why and now.status in (Status.REFUSED, Status.REFUTED)
            else None
        )
    if now.status is Status.REFUTED:
        return ChangeKind.REFUTED
    if was.status not in CLAIMED or now.status not in CLAIMED:
        claimed = ChangeKind.CLAIMED if now.status in CLAIMED else None
        # None: refused in both, and run in only one.
        return ChangeKind.WITHDRAWN if was.status in CLAIMED else claimed
    if now.status is Status.VERIFIED:
        return ChangeKind.VERIFIED
    return ChangeKind.UNKNOWN if was.status in (Status.VERIFIED, Status.REFUTED) else None
