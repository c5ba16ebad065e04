"""The ranges of steps in which measured times say that another backend than the phase's choice is faster."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from attnplug.core.composite.steps import StepChoice, StepKind, StepRange, StepSizes
from attnplug.core.spec import Phase
from attnplug.registry.devices import is_here
from attnplug.registry.measured.comparisons import least_gain
from attnplug.registry.measured.tuned import layer_key
from attnplug.registry.selection.decision import Placement
from attnplug.registry.selection.measured_ranking import TableForLayer

if TYPE_CHECKING:
    from attnplug.registry.measured.comparisons import Run
    from attnplug.registry.measured.step_shapes import StepShape
    from attnplug.registry.measured.tuned import TunedLayer, TunedTable
    from attnplug.registry.measured.tuned_lookup import Tables
    from attnplug.registry.selection.decision import Candidate, Decision


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A choice by measured times, and the candidate that serves its steps."""

    choice: StepChoice
    candidate: Candidate


@dataclasses.dataclass(frozen=True, slots=True)
class SeenStep:
    """A step at which the phase's choice and another backend were measured.

    Args:
        sizes: of the step.
        as_fast: the backends that were not slower than the phase's choice there.
    """

    sizes: StepSizes
    as_fast: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """The choices, and the measured steps."""

    found: tuple[MeasuredStep, ...] = ()
    seen: tuple[SeenStep, ...] = ()

    def refute(self, steps: StepRange, name: str) -> bool:
        """Whether backend `name` was slower than the phase's choice, or not measured, at a measured step of the range."""
        return any(steps.has(each.sizes) and name not in each.as_fast for each in self.seen)


def measured_steps(
    decisions: Mapping[Phase | None, Decision], pair: Decision, tables: Tables
) -> MeasuredSteps:
    """The choices of the first table that has times of the layer.

    Args:
        decisions: for each phase, and for both.
        pair: of the two backends that the phases choose.
        tables: measured times, the most important first.
    """
    both = decisions[None]
    for table in tables.tables:
        layer = table.by_key.get(layer_key(both.spec)) if table.is_for(both.device) else None
        if layer is None:
            continue
        reader = _Reader(table, layer)
        for kind in StepKind:
            phase = kind.phase
            default = pair if kind is StepKind.MIXED else decisions[phase]
            # A rule or a plugin that ranks was asked about the whole phase.
            if not decisions[phase].rule and not decisions[phase].ranked_by:
                reader.read(kind, default, decisions[phase])
        if reader.seen:
            return MeasuredSteps(tuple(reader.found), tuple(reader.seen))
    return MeasuredSteps()


_BY: Mapping[StepKind, str] = {StepKind.DECODE: "requests", StepKind.PREFILL: "query"}
"""The quantity by which a kind of steps is divided."""


def sizes_of(shape: StepShape) -> StepSizes:
    """The numbers of a measured step by which a composite chooses."""
    kind = StepKind.MIXED if shape.phase is None else StepKind(shape.phase)
    if kind is StepKind.DECODE and shape.query > 1:
        kind = StepKind.DRAFT
    return StepSizes(kind, shape.query, shape.requests, shape.tokens, max(shape.lengths))


@dataclasses.dataclass(slots=True)
class _Reader:
    """Reads the rows of one layer of a table, kind by kind."""

    table: TunedTable
    layer: TunedLayer
    found: list[MeasuredStep] = dataclasses.field(default_factory=list)
    seen: list[SeenStep] = dataclasses.field(default_factory=list)

    def read(self, kind: StepKind, default: Decision, decision: Decision) -> None:
        """The choices for one kind of steps against the default, among the accepted candidates of a decision."""
        placement = Placement(decision.spec, decision.device, decision.phase)
        others = self.table.other_versions(here=is_here(decision.device), assumed=decision.assumed)
        times = self.table.times[layer_key(decision.spec)][decision.phase]
        rows = TableForLayer(self.table, times, placement, others, [])
        chosen = default.chosen
        own = None if chosen is None else rows.run_of(chosen, default.pages)
        if own is None or own.failed:
            return
        # Members share one cache, so that times with other pages say nothing.
        runs = [
            (each, run)
            for each in decision.candidates
            if each.accepted and each.name != default.backend
            for run in [rows.run_of(each, default.pages)]
            if run is not None and not run.failed and run.pages == default.pages
        ]
        sizes = {
            place: found
            for place in own.rows
            for found in [sizes_of(self.layer.workload[place][0])]
            if found.kind is kind
        }
        measured = [place for place in sizes if any(place in run.rows for _, run in runs)]
        for place in measured:
            as_fast = frozenset(each.name for each, run in runs if _won(own, run, [place]) is not None)
            self.seen.append(SeenStep(sizes[place], as_fast))
        choices = [
            (gain, each, steps, place)
            for each, run in runs
            for steps, place, gain in self._ranges(kind, own, run, {p: sizes[p] for p in measured})
        ]
        for gain, candidate, steps, place in sorted(choices, key=lambda each: -each[0]):
            shape = self.layer.workload[place][0]
            ratio = f"measured {gain:.2f}x faster than {default.backend} at {shape}"
            choice = StepChoice(steps, candidate.name, f"{ratio} in {self.table.name}")
            # Of overlapping ranges the one with the larger gain decides.
            if any(each.choice.steps.covers(steps) for each in self.found):
                continue
            self.found.append(MeasuredStep(choice, candidate))

    def _ranges(
        self, kind: StepKind, own: Run, other: Run, sizes: Mapping[int, StepSizes]
    ) -> Iterator[tuple[StepRange, int, float]]:
        """The ranges in which `other` is faster, each with its best step and gain.

        It is at no measured step slower, or in a range of lengths or requests gains more than it loses.
        """
        if kind not in _BY:
            won = _won(own, other, list(sizes))
            if won:
                best = max(won, key=lambda place: _gain(own, other, place))
                steps = StepRange(kind) if kind is StepKind.DRAFT else _around(list(sizes.values()))
                yield steps, best, _gain(own, other, best)
            return
        name = _BY[kind]
        groups: dict[int, list[int]] = {}
        for place in sorted(sizes, key=lambda place: getattr(sizes[place], name)):
            groups.setdefault(getattr(sizes[place], name), []).append(place)
        for is_below, ordered in ((True, list(groups)), (False, list(reversed(groups)))):
            limit, most, total, seen, within = None, 0.0, 0.0, list[int](), list[int]()
            for number in ordered:
                if any(place not in other.rows for place in groups[number]):
                    break
                # A prompt that is twice as fast is worth one that is twice as slow.
                total += sum(math.log(_gain(own, other, place)) for place in groups[number])
                seen += groups[number]
                # A range ends at the last measured step that it won.
                if total > most and _won(own, other, groups[number]):
                    limit, most, within = number, total, [*seen]
            if limit is None or (not is_below and limit == next(iter(groups))):
                continue
            best = max(within, key=lambda place: _gain(own, other, place))
            span = (1, limit) if is_below else (limit, None)
            yield StepRange(kind, **{name: span}), best, _gain(own, other, best)


def _around(sizes: Sequence[StepSizes]) -> StepRange:
    """The mixed steps that are like measured ones: up to twice as large, and no longer."""
    requests = [each.requests for each in sizes]
    return StepRange(
        StepKind.MIXED,
        query=(1, 2 * max(each.query for each in sizes)),
        requests=(max(1, min(requests) // 2), 2 * max(requests)),
        rows=(1, 2 * max(each.rows for each in sizes)),
        keys=(1, max(each.keys for each in sizes)),
    )


def _gain(own: Run, other: Run, place: int) -> float:
    return own.costs[place] / other.costs[place]


def _won(own: Run, other: Run, places: Sequence[int]) -> list[int] | None:
    """The steps at which `other` is faster beyond the noise; None if it is slower, or not measured, at one."""
    won = []
    for place in places:
        if place not in other.rows:
            return None
        noise = least_gain(max(own.rows[place].spread, other.rows[place].spread))
        gain = _gain(own, other, place)
        if 1 / gain > noise:
            return None
        if gain > noise:
            won.append(place)
    return won
