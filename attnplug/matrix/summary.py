"""Sums up the cells of a run for each value of each axis."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from attnplug.core.kv_format import kv_format
from attnplug.matrix.axes import AXES, PLAIN, Extent, cell_values, goes_with
from attnplug.matrix.model import CLAIMED, Finding, Matrix, Run, Status
from attnplug.matrix.words import (
    AXIS_NAMES,
    MEANINGS,
    Value,
    in_order,
    list_in_words,
    one_line,
    source_in_words,
    value_in_words,
)

BESIDE = ("feature", "phase")
"""The axes with a table row for each value; the values of the other axes are listed in one row."""
# A right cell must not hide a wrong one, and a run counts more than a claim.
# Verified cells together are only a sample, unless every combination was run.
STRONGEST_FIRST = (
    Status.REFUTED,
    Status.VERIFIED,
    Status.SAMPLED,
    Status.COMPILED,
    Status.DECLARED,
    Status.NOT_RUN,
    Status.UNCLAIMED,
    Status.REFUSED,
)
"""The first that any of several cells has is the status of all."""
_FEW = 2
"""The most served values that an answer names; more are counted."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """A value of another axis: both values are served, but not together.

    Args:
        axis: the other axis.
        value: of that axis.
        why: the reasons.
    """

    axis: str
    value: Value
    why: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Restriction:
    """Another axis that restricts a value: it is served with some of its values only.

    Args:
        axis: the other axis.
        served: its served values, in reading order.
        asked: the number of its values that were asked.
    """

    axis: str
    served: tuple[Value, ...]
    asked: int

    def __str__(self) -> str:
        """Such as "fp8_e5m2 only", "head size 192 only" or "3 of 12 head sizes"."""
        name = AXIS_NAMES[self.axis]
        if len(self.served) > _FEW:
            return f"{len(self.served)} of {self.asked} {name}s"
        values = " and ".join(one_line(value_in_words(self.axis, value)) for value in self.served)
        speaks = (
            self.axis in BESIDE
            or None in self.served
            or all(kv_format(str(each)).is_quantized for each in self.served)
        )
        return f"{values} only" if speaks else f"{name} {values} only"


@dataclasses.dataclass(frozen=True, slots=True)
class ValueSummary:
    """The cells with one value, summed up.

    Args:
        status: the first of STRONGEST_FIRST that any of the cells has; SAMPLED in place of VERIFIED if any combination of
            served values was not run.
        counts: the number of cells with each status.
        why: the reasons common to all cells if all are refused; else the evidence against the value.
        limits: the values that it is not served with.
        restriction: the axis that restricts it to few of its values, if there is one; the first of several.
    """

    status: Status
    counts: Mapping[Status, int]
    why: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    restriction: Restriction | None = None
    lacking: str = ""
    """Of a sample: an axis of which values were not run, such as "3 of 31 head sizes"."""
    sources: tuple[str, ...] = ()
    """Of a joined run: the other sources of the cells with this status, such as "on NVIDIA H200"."""
    is_elsewhere: bool = False
    """Whether none of these cells is of the run itself."""

    @property
    def elsewhere(self) -> str:
        """The other sources in words: "on NVIDIA H200", or "also on NVIDIA H200" beside the run itself."""
        words = " and ".join(map(one_line, self.sources))
        return words if self.is_elsewhere or not words else f"also {words}"

    @property
    def is_starred(self) -> bool:
        """Whether there is a limit that the restriction does not tell."""
        told = self.restriction and self.restriction.axis
        return any(limit.axis != told for limit in self.limits)

    @property
    def claimed(self) -> int:
        """The number of claimed cells."""
        return sum(self.counts.get(status, 0) for status in CLAIMED)

    @property
    def part(self) -> str:
        """The share of the claimed cells with this status, "3/40", if only some were run; else empty.

        For a sample it is `lacking`, if there is such an axis.
        """
        return self.lacking or self.fraction

    @property
    def fraction(self) -> str:
        """The share of the claimed cells with this status, if only some were run; else empty."""
        may_be_part = self.status in (Status.VERIFIED, Status.SAMPLED, Status.COMPILED, Status.REFUTED)
        return f"{self._count}/{self.claimed}" if may_be_part and self._count != self.claimed else ""

    @property
    def ran(self) -> str:
        """As `part`; for a sample that has none, the number of cells that were run: "36 cells"."""
        if self.part or self.status is not Status.SAMPLED:
            return self.part
        return f"{self._count:,} cell{'s' if self._count > 1 else ''}"

    @property
    def _count(self) -> int:
        return self.counts.get(Status.VERIFIED if self.status is Status.SAMPLED else self.status, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class RunSummary:
    """A run, summed up.

    Args:
        run: the run.
        total: the answer of all its cells.
        answers: by axis and value, in reading order.
    """

    run: Run
    total: ValueSummary
    answers: Mapping[str, Mapping[Value, ValueSummary]]


def by_device(matrix: Matrix) -> dict[str, list[Run]]:
    """The runs of each device, in the order of the matrix."""
    found: dict[str, list[Run]] = {}
    for run in matrix.runs:
        found.setdefault(run.device, []).append(run)
    return found


def summarise(run: Run) -> RunSummary:
    """Sum up a run by every value of every axis."""
    rows = [(cell_values(finding.cell), finding) for finding in run.findings]
    groups: dict[tuple[int, Value], list[Finding]] = collections.defaultdict(list)
    for values, finding in rows:
        for key in enumerate(values):
            groups[key].append(finding)
    extent = Extent(run)
    limits = _limits(rows)
    restrictions = _restrictions(rows)
    answers: dict[str, dict[Value, ValueSummary]] = {}
    for index, axis in enumerate(AXES):
        values_of_axis = in_order(axis, (value for position, value in groups if position == index))
        answers[axis] = {
            value: dataclasses.replace(
                _answer(run, groups[index, value], extent, axis, value),
                limits=tuple(limits.get((index, value), ())),
                restriction=restrictions.get((index, value)),
            )
            for value in values_of_axis
        }
    return RunSummary(run, _answer(run, run.findings, extent), answers)


def _answer(
    run: Run, findings: Sequence[Finding], extent: Extent, axis: str | None = None, value: Value = None
) -> ValueSummary:
    counts = collections.Counter(finding.status for finding in findings)
    status = next((status for status in STRONGEST_FIRST if counts[status]), Status.NOT_RUN)
    same = [finding.why for finding in findings if finding.status is status]
    places = {finding.source for finding in findings if finding.status is status}
    others = tuple(source_in_words(run, each) for number, each in enumerate(run.sources) if number in places)
    is_elsewhere = bool(others) and None not in places
    if status is Status.REFUSED:
        # The reasons common to all; if there are none, the shortest list.
        distinct = [set(each) for each in set(same)]
        shortest = min(same, key=len)
        why = tuple(reason for reason in shortest if all(reason in each for each in distinct)) or shortest
    elif status in (Status.COMPILED, Status.REFUTED, Status.NOT_RUN):
        why = tuple(dict.fromkeys(itertools.chain.from_iterable(same)))
    else:
        why = ()
    answer = ValueSummary(status, dict(counts), why, sources=others, is_elsewhere=is_elsewhere)
    if status is Status.VERIFIED and not extent.is_whole(findings, axis, value):
        lacking = extent.lacking(findings, axis, value)
        return dataclasses.replace(answer, status=Status.SAMPLED, lacking=lacking)
    return answer


def _limits(rows: Sequence[tuple[tuple[Value, ...], Finding]]) -> dict[tuple[int, Value], list[Limit]]:
    """The pairs of values that are in refused cells and in no claimed cell, though claimed cells have each value."""
    served: set[tuple[int, Value]] = set()
    pairs: set[tuple[tuple[int, Value], ...]] = set()
    for values, finding in rows:
        if finding.status in CLAIMED:
            served.update(enumerate(values))
            pairs.update(itertools.combinations(enumerate(values), 2))
    found: dict[tuple[int, Value], dict[tuple[int, Value], Limit]] = {}
    for values, finding in rows:
        if finding.status in CLAIMED:
            continue
        for one, other in itertools.combinations(enumerate(values), 2):
            if one in served and other in served and (one, other) not in pairs:
                for this, that in ((one, other), (other, one)):
                    limit = Limit(AXES[that[0]], that[1], finding.why)
                    found.setdefault(this, {}).setdefault(that, limit)
    return {key: list(limits.values()) for key, limits in found.items()}


def _restrictions(
    rows: Sequence[tuple[tuple[Value, ...], Finding]],
) -> dict[tuple[int, Value], Restriction]:
    """For each served value the axis that restricts it, with at most two values or with fewer than it is refused."""
    # A value that the backend refuses with everything has a row of its own, so it restricts
    # no other value. The exception is an axis without any value for a plain layer, such as
    # the KV dtypes of the feature fp8 KV: the refused ones are refused for this feature.
    asked: dict[tuple[int, Value, int], dict[Value, bool]] = collections.defaultdict(dict)
    anywhere: set[tuple[int, Value]] = set()
    for values, finding in rows:
        claimed = finding.status in CLAIMED
        if claimed:
            anywhere.update(enumerate(values))
        for (index, value), (other, its) in itertools.permutations(enumerate(values), 2):
            by_value = asked[index, value, other]
            by_value[its] = claimed or by_value.get(its, False)
    found: dict[tuple[int, Value], Restriction] = {}
    for (index, value, other), by_value in asked.items():
        axis = AXES[other]
        served = [its for its, is_served in by_value.items() if is_served]
        own = AXES[index] == "feature" and not any(goes_with(PLAIN, axis, its) for its in by_value)
        refused = [its for its in by_value if its not in served and (own or (other, its) in anywhere)]
        if served and refused and (own or len(served) <= _FEW or len(served) < len(refused)):
            restriction = Restriction(axis, tuple(in_order(axis, served)), len(by_value))
            if own or (index, value) not in found:
                found[index, value] = restriction
    return found


def values_of(summaries: Iterable[RunSummary], axis: str) -> list[Value]:
    """The values of an axis that any run has, in reading order."""
    return in_order(axis, (value for summary in summaries for value in summary.answers[axis]))


def counts_in_words(counts: Mapping[Status, int]) -> str:
    """The number of cells with each status: "1,204 verified, 72 refused"."""
    found = [(counts.get(status, 0), status) for status in MEANINGS]
    return ", ".join(f"{count:,} {status}" for count, status in found if count) or "none"


def sources(summaries: Iterable[RunSummary]) -> list[tuple[str, Run, str]]:
    """A row for each run and for each other source of it: the backend, the run, and its cells in words.

    The row of another source follows that of its run, and names the features of its cells.
    """
    rows = []
    for run in (summary.run for summary in summaries):
        for number, source in ((None, run), *enumerate(run.sources)):
            found = [each for each in run.findings if each.source == number]
            words = counts_in_words(collections.Counter(each.status for each in found))
            if number is None:
                rows.append((run.backend, source, words))
            elif found:
                features = in_order("feature", (each.cell.feature for each in found))
                names = ", ".join(value_in_words("feature", each) for each in features)
                rows.append((f"{run.backend}, also", source, f"{words}: {names}"))
    return rows


def values_by_status(axis: str, answers: Mapping[Value, ValueSummary]) -> dict[Status, str]:
    """The values of an axis by status, as a list; a star marks each value with limits."""
    # A fraction of the cells is shorter than what a sample lacks. None, of cells
    # without pages, is left out: the features direct KV and encoder say the same.
    lists = {}
    for status in MEANINGS:
        marked = [
            (
                value,
                ("*" if answer.limits else "") + (f" ({', '.join(told)})" if (told := _told(answer)) else ""),
            )
            for value, answer in answers.items()
            if answer.status is status and value is not None
        ]
        if marked:
            lists[status] = list_in_words(axis, marked)
    return lists


def _told(answer: ValueSummary) -> list[str]:
    """The words in brackets behind a value of a list."""
    words = (answer.fraction or answer.part, answer.elsewhere if answer.is_elsewhere else "")
    return [each for each in words if each]


def serving(summaries: Iterable[RunSummary]) -> list[RunSummary]:
    """The summaries with a cell that is not refused."""
    return [summary for summary in summaries if summary.total.status is not Status.REFUSED]


def refusal_lines(summaries: Iterable[RunSummary]) -> list[str]:
    """A line for each backend that serves nothing on its device, with the reasons."""
    return [
        f"{summary.run.backend}: {'; '.join(summary.total.why)}"
        for summary in summaries
        if summary.total.status is Status.REFUSED
    ]


def evidence_lines(summaries: Iterable[RunSummary], status: Status) -> list[str]:
    """The evidence of the cells with a status: one line for all cells of a backend with the same evidence."""
    said: dict[tuple[str, str], list[str]] = {}
    for summary in summaries:
        for finding in summary.run.findings:
            if finding.status is status:
                why = "; ".join(finding.why) or "nothing was recorded"
                said.setdefault((summary.run.backend, why), []).append(finding.cell.id)
    lines = []
    for (backend, why), cells in said.items():
        more = f" and {len(cells) - 3:,} more" if len(cells) > 3 else ""
        lines.append(f"{backend} {', '.join(cells[:3])}{more}: {why}")
    return lines


def prefix_rows(summaries: Iterable[RunSummary]) -> list[tuple[str, str, str]]:
    """By backend, the features whose layers share prefixes, then those whose layers do not, and why."""
    rows = []
    for run in (summary.run for summary in summaries):
        by_reason: dict[str | None, list[str]] = {}
        shown = {each.cell.feature for each in run.findings if each.status is not Status.REFUSED}
        for name, why in sorted(run.prefixes.items(), key=lambda each: each[1] is not None):
            if name in shown:
                by_reason.setdefault(why, []).append(value_in_words("feature", name))
        rows += [
            (run.backend, ", ".join(names), "read once" if why is None else why)
            for why, names in by_reason.items()
        ]
    return rows


def spill_lines(summaries: Iterable[RunSummary]) -> list[str]:
    """A line for each kernel of a backend of which some are compiled with spills."""
    lines = []
    for run in (summary.run for summary in summaries):
        by_name: dict[str, list[int]] = {}
        for kernel in (each for one in (run, *run.sources) for each in one.kernels):
            by_name.setdefault(kernel.name, []).append(kernel.spilled)
        for name, spilled in by_name.items():
            if some := [each for each in spilled if each]:
                most = f"at most {max(some)} bytes of a thread"
                lines.append(f"{run.backend} {name}: {len(some)} of {len(spilled)} spill, {most}")
    return lines
