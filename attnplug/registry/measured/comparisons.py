"""Measured times of one kind of layer, compared when their table is read: a selection looks the result up."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from attnplug._system.json_files import typed
from attnplug.core.spec import Phase
from attnplug.registry.plugins.records import COMPOSITE_SEPARATOR

if TYPE_CHECKING:
    from attnplug.registry.measured.tuned import TimedRow, TunedLayer
    from attnplug.registry.plugins.installed import BackendVersions
    from attnplug.registry.selection.evidence import Pages


MIN_GAIN = 0.02
"""A backend must be faster than the default by more than this share, and by more than twice the spread."""


def least_gain(spread: float) -> float:
    """The ratio of two times above which they differ by more than the noise."""
    return 1 + max(MIN_GAIN, 2 * spread)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Why a backend comes first by measured times.

    Args:
        is_default: it also comes first by priority, and no other was faster beyond the noise.
        over: the backend that `ratio` compares with: the default, or for the default the next measured one; None
            without another.
        ratio: time of `over` divided by its own, in steps of the whole model.
        shape: the step of the workload with the most weight.
        shapes: number of steps in the workload.
        spread: of the rounds of both, relative to the time.
        date: of the measurement, without the time of day.
        table: the digest of the table.
    """

    is_default: bool
    over: str | None
    ratio: float
    shape: str
    shapes: int
    spread: float
    date: str
    table: str

    def __str__(self) -> str:
        more = f" and {self.shapes - 1} more" if self.shapes > 1 else ""
        about = f"at {self.shape}{more}, spread {100 * self.spread:.1f} %, {self.date}"
        if self.over is None:
            return f"measured alone {about}"
        if self.is_default and self.ratio < 1 + MIN_GAIN:
            gain = 1 / self.ratio
            if gain > least_gain(self.spread):
                return f"measured, and {self.over} is slower at one step, though {gain:.2f}x faster {about}"
            return f"measured, and {self.over} is not faster beyond the noise ({gain:.2f}x) {about}"
        return f"measured {self.ratio:.2f}x faster than {self.over} {about}"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The comparison that `dataclasses.asdict` wrote; LookupError, TypeError or ValueError for damaged data."""
        kinds: dict[str, tuple[type | None, ...]] = dict.fromkeys(("shape", "date", "table"), (str,))
        kinds |= {"is_default": (bool,), "over": (str, None), "shapes": (int,)}
        kinds |= dict.fromkeys(("ratio", "spread"), (int, float))
        found = cls(**{name: typed(data, name, *each) for name, each in kinds.items()})
        if found.ratio <= 0:
            raise ValueError(f"ratio must be above 0, not {found.ratio}")
        return found


# Rows of several versions and pages multiply the choices; a selection compares the others when it needs them.
_MOST_PREPARED = 16
Owner: TypeAlias = tuple[str, str | None]
"""A backend's name and its distribution."""


@dataclasses.dataclass(slots=True)
class Run:
    """The rows of one backend with equal versions and pages, in one phase or in both.

    Args:
        number: its place among the runs of its layer.
        subject: the backend and its versions.
        pages: the pages that it was measured with.
        rows: the measured ones, by place in the workload.
        costs: microseconds of a step of the model, by place.
        failed: it was wrong or crashed at a step of the phase.
    """

    number: int
    subject: BackendVersions
    pages: Pages
    rows: dict[int, TimedRow] = dataclasses.field(default_factory=dict)
    costs: dict[int, float] = dataclasses.field(default_factory=dict)
    failed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of some runs with one of them, the default.

    Args:
        order: the numbers of the comparable runs, the best first.
        times: microseconds of a layer's attention at `measured.shape`, in the same order.
        measured: why the first one comes first.
        alone: the one phase that has times, if they are of one phase only.
    """

    order: tuple[int, ...]
    times: tuple[float, ...]
    measured: Measured
    alone: Phase | None


class PhaseTimes:
    """The runs of one kind of layer in one phase, or in both.

    Args:
        layer: the measurements.
        phase: whose shapes count; None for all.
        table: the digest of the table.
    """

    def __init__(self, layer: TunedLayer, phase: Phase | None, table: str) -> None:
        self._table = table
        self._weights = [weight for _, weight in layer.workload]
        self._names = [str(shape) for shape, _ in layer.workload]
        self._phases = [shape.phase for shape, _ in layer.workload]
        self._runs = _runs(layer, phase)
        self._comparisons: dict[tuple[int, ...], Comparison] = {}
        self.by_owner: dict[Owner, tuple[Run, ...]] = {}
        """The runs of each backend."""
        for run in self._runs:
            owner = (run.subject.backend, run.subject.distribution)
            self.by_owner[owner] = (*self.by_owner.get(owner, ()), run)
        self._prepare()

    def _prepare(self) -> None:
        """Compare what selections most likely ask for: all backends, with any of them as the default."""
        # Composites are no candidates unless a plan compares one with one backend.
        alone = (runs for owner, runs in self.by_owner.items() if COMPOSITE_SEPARATOR not in owner[0])
        timed = [[each for each in runs if each.rows and not each.failed] for runs in alone]
        choices = [[each.number for each in runs] for runs in timed if runs]
        # A backend with rows of several versions or pages takes part with one of them.
        for numbers in itertools.islice(itertools.product(*choices), _MOST_PREPARED):
            for default in numbers:
                self.comparison(default, sorted(numbers))

    def comparison(self, default: int, numbers: Sequence[int]) -> Comparison:
        """The comparison of the runs with these numbers, which ascend, with the run `default` among them."""
        key = (default, *numbers)
        found = self._comparisons.get(key)
        if found is None:
            found = self._comparisons[key] = self._compared(default, numbers)
        return found

    def _compared(self, default: int, numbers: Sequence[int]) -> Comparison:
        own = self._runs[default]
        shapes = sorted(own.rows)
        # A run without times at every shape of the default cannot be compared with it.
        timed = [self._runs[n] for n in numbers if self._runs[n].rows.keys() >= own.rows.keys()]
        scores = self._scores(timed, shapes)
        # With equal times the default comes first, because a change of backend needs a reason.
        order = sorted((run.number for run in timed), key=lambda number: (scores[number], number != default))
        winner = next(
            number
            for number in order
            if number == default
            or self._beats(self._runs[number], own, shapes, scores[default] / scores[number])
        )
        rest = [number for number in order if number != winner]
        over = default if winner != default else next(iter(rest), None)
        ratio = 1.0 if over is None else scores[over] / scores[winner]
        measured = self._measured(self._runs[winner], over, ratio, own)
        shown = self._heaviest(shapes)
        phases = {self._phases[shape] for shape in shapes}
        found = (winner, *rest)
        times = tuple(self._runs[number].rows[shown].us for number in found)
        return Comparison(found, times, measured, next(iter(phases)) if len(phases) == 1 else None)

    def _heaviest(self, shapes: Sequence[int]) -> int:
        return max(shapes, key=self._weights.__getitem__)

    def _measured(self, winner: Run, over: int | None, ratio: float, default: Run) -> Measured:
        shapes = sorted(default.rows)
        return Measured(
            winner is default,
            None if over is None else self._runs[over].subject.backend,
            # Not to a number of decimals, because a small ratio must not become 0.
            float(f"{ratio:.5g}"),
            self._names[self._heaviest(shapes)],
            len(shapes),
            round(self._spread(winner, winner if over is None else self._runs[over], shapes), 5),
            max(winner.rows[shape].date for shape in shapes)[:10],
            self._table,
        )

    def _scores(self, timed: Sequence[Run], shapes: Sequence[int]) -> dict[int, float]:
        # Each shape counts relative to its fastest backend, so that long steps do not hide short ones.
        costs = [[run.costs[shape] for shape in shapes] for run in timed]
        best = [min(each) for each in zip(*costs, strict=True)]
        units = [self._weights[shape] / us for shape, us in zip(shapes, best, strict=True)]
        return {
            run.number: sum(map(operator.mul, units, each)) for run, each in zip(timed, costs, strict=True)
        }

    def _beats(self, own: Run, default: Run, shapes: Sequence[int], gain: float) -> bool:
        """Whether it is faster than the default beyond the noise, and at no shape slower beyond the noise."""
        if gain <= least_gain(self._spread(own, default, shapes)):
            return False
        for shape in shapes:
            spread = max(own.rows[shape].spread, default.rows[shape].spread)
            if own.costs[shape] > default.costs[shape] * least_gain(spread):
                return False
        return True

    def _spread(self, own: Run, default: Run, shapes: Sequence[int]) -> float:
        """The larger of both spreads, as a weighted mean over shapes."""
        weights = [self._weights[shape] for shape in shapes]
        spreads = [max(own.rows[shape].spread, default.rows[shape].spread) for shape in shapes]
        weighted = sum(w * spread for w, spread in zip(weights, spreads, strict=True))
        return weighted / sum(weights)


def _runs(layer: TunedLayer, phase: Phase | None) -> list[Run]:
    places: Mapping[object, int] = {shape: place for place, (shape, _) in enumerate(layer.workload)}
    runs: dict[tuple[BackendVersions, Pages], Run] = {}
    for row in layer.rows:
        key = (row.subject, row.pages)
        run = runs.setdefault(key, Run(len(runs), *key))
        place = places.get(row.shape)
        if place is None or phase not in (None, row.shape.phase):
            continue
        if row.is_measured:
            run.rows[place], run.costs[place] = row, layer.cost(row)
        else:
            run.failed = True
    found = list(runs.values())
    for run in found:
        if COMPOSITE_SEPARATOR in run.subject.backend:
            _take_halves(run, found, layer)
    return found


def _take_halves(run: Run, runs: Sequence[Run], layer: TunedLayer) -> None:
    """Give a composite, which was measured in mixed steps, the times of its halves in the steps of their phases."""
    names = run.subject.backend.split(COMPOSITE_SEPARATOR)
    for name, phase in zip(names, (Phase.PREFILL, Phase.DECODE), strict=True):
        for half in runs:
            same = half.subject.backend == name and half.pages == run.pages
            if same and set(half.subject.versions) <= set(run.subject.versions) and not half.failed:
                places = [place for place in half.rows if layer.workload[place][0].phase is phase]
                run.rows |= {place: half.rows[place] for place in places}
                run.costs |= {place: half.costs[place] for place in places}
