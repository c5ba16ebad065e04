"""The combinations that a run tried of those that its backend serves: a sample never stands for the others."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence

from attnplug.matrix.axes import goes_with
from attnplug.matrix.model import Finding, Run, Status
from attnplug.matrix.words import AXIS_NAMES, Value

_AXES = tuple(AXIS_NAMES)
_values = operator.attrgetter(*_AXES)
_CLAIMED = (Status.DECLARED, Status.VERIFIED, Status.REFUTED, Status.NOT_RUN)
_RAN = (Status.VERIFIED, Status.REFUTED)


def served_values(findings: Iterable[Finding]) -> dict[str, tuple[Value, ...]]:
    """The values of each axis that claimed cells have, in order of appearance."""
    claimed = [_values(each.cell) for each in findings if each.status in _CLAIMED]
    return {axis: tuple(dict.fromkeys(row[place] for row in claimed)) for place, axis in enumerate(_AXES)}


class Extent:
    """What a run tried.

    Args:
        run: without `axes`, as files of version 1 are, none of its answers is whole.
    """

    def __init__(self, run: Run) -> None:
        self._served: Mapping[str, Sequence[Value]] = run.axes or served_values(run.findings)
        self._sets = [set(self._served[axis]) for axis in _AXES]
        self._is_known = run.axes is not None
        found = served_values(run.findings)
        self._filtered = {axis for axis in _AXES if not set(self._served[axis]) <= set(found[axis])}
        self._latents = {each.cell.head_size for each in run.findings if each.cell.feature == "mla"}

    def combinations(self, axis: str | None = None, value: Value = None) -> int:
        """The combinations of all served values, or of those that have a value of an axis."""
        total = 0
        for feature in self._served["feature"]:
            if axis == "feature" and feature != value:
                continue
            counts = [
                sum(
                    goes_with(str(feature), name, each, self._latents)
                    for each in ((value,) if name == axis else self._served[name])
                )
                for name in _AXES[1:]
            ]
            total += math.prod(counts)
        return total

    def is_whole(self, findings: Iterable[Finding], axis: str | None = None, value: Value = None) -> bool:
        """Whether every combination was run and is right, or is refused.

        Args:
            findings: of the run, or those with a value of an axis.
            axis: that of the value; None for all findings.
            value: that all `findings` have.
        """
        if not self._is_known:
            return False
        settled = sum(
            each.status in (Status.VERIFIED, Status.REFUSED)
            and all(one in known for one, known in zip(_values(each.cell), self._sets, strict=True))
            for each in findings
        )
        return settled == self.combinations(axis, value)

    def lacking(self, findings: Sequence[Finding], axis: str | None = None, value: Value = None) -> str:
        """The first other axis of which served values were not run: "3 of 31 head sizes"; empty if there is none.

        Values that were refused with all `findings` do not count.
        """
        for place, name in enumerate(_AXES):
            if name == axis:
                continue
            ran = {_values(each.cell)[place] for each in findings if each.status in _RAN}
            served = {_values(each.cell)[place] for each in findings if each.status in _CLAIMED}
            refused = {_values(each.cell)[place] for each in findings} - served
            if name in self._filtered:
                served |= {
                    each for each in self._served[name] if self._goes(axis, value, name, each)
                } - refused
            served.discard(None)
            if len(ran & served) < len(served):
                return f"{len(ran & served)} of {len(served)} {AXIS_NAMES[name]}s"
        return ""

    def _goes(self, axis: str | None, value: Value, other: str, its: Value) -> bool:
        """Whether a layer can have both values, as far as a feature decides that."""
        if axis == "feature":
            return goes_with(str(value), other, its, self._latents)
        return axis is None or other != "feature" or goes_with(str(its), axis, value, self._latents)
