"""The differences of two matrices, and whether a claim was lost."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator

from attnplug.matrix.model import Finding, Matrix, Run, Status

_CLAIMED = {Status.DECLARED, Status.VERIFIED, Status.REFUTED, Status.NOT_RUN}


class Kind(enum.StrEnum):
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
        return self in (Kind.REFUTED, Kind.WITHDRAWN, Kind.VANISHED)


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A cell, by its id, that changed.

    The status before, `old`, is None for a new cell; that now, `new`, is None for a cell that is gone. `why` has
    the reasons or the evidence now.
    """

    backend: str
    device: str
    cell: str
    kind: Kind
    old: Status | None
    new: Status | None
    why: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = f"{self.backend} on {self.device}: {self.cell} {self.kind}"
        before = f" (was {self.old})" if self.old is not None and self.new is not None else ""
        return said + before + (f": {'; '.join(self.why)}" if self.why else "")


def changes(old: Matrix, new: Matrix) -> list[Change]:
    """All cells that changed: the gravest changes first, then in the order of the matrices."""
    before = {run.key: run for run in old.runs}
    after = {run.key: run for run in new.runs}
    found = [
        change
        for key in dict.fromkeys([*before, *after])
        for change in _of_run(key, before.get(key), after.get(key))
    ]
    order = list(Kind)
    return sorted(found, key=lambda change: order.index(change.kind))


def _of_run(key: tuple[str, str], old: Run | None, new: Run | None) -> Iterator[Change]:
    before, after = ({each.cell.id: each for each in (run.findings if run else ())} for run in (old, new))
    for cell in dict.fromkeys([*before, *after]):
        was, now = before.get(cell), after.get(cell)
        kind = _kind(was, now)
        if kind is not None:
            then, today = (None if each is None else each.status for each in (was, now))
            yield Change(*key, cell, kind, then, today, now.why if now else ())


def _kind(was: Finding | None, now: Finding | None) -> Kind | None:
    if was is None or now is None:
        if now is not None:
            return Kind.REFUTED if now.status is Status.REFUTED else Kind.ADDED
        return Kind.VANISHED if was is not None and was.status in _CLAIMED else Kind.DROPPED
    if was.status is now.status:
        return Kind.REASONS if was.why != now.why and now.status in (Status.REFUSED, Status.REFUTED) else None
    if now.status is Status.REFUTED:
        return Kind.REFUTED
    if now.status in _CLAIMED:
        return _still_claimed(was.status, now.status)
    if was.status in _CLAIMED:
        return Kind.WITHDRAWN
    return None  # refused in both, and run in only one


def _still_claimed(was: Status, now: Status) -> Kind | None:
    if was not in _CLAIMED:
        return Kind.CLAIMED
    if now is Status.VERIFIED:
        return Kind.VERIFIED
    return Kind.UNKNOWN if was in (Status.VERIFIED, Status.REFUTED) else None
