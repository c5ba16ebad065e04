"""The ranking by measured times: it reorders accepted candidates, and adds none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnplug.registry.devices import is_here
from attnplug.registry.gates import preferred_pages, serving
from attnplug.registry.measured_choice import MIN_GAIN, Measured
from attnplug.registry.plugin_calls import guarded_call
from attnplug.registry.tuned import Row, TunedLayer, TunedTable, layer_key, other_version

if TYPE_CHECKING:
    from attnplug.core.spec import Phase
    from attnplug.registry.decision import Placement
    from attnplug.registry.installed import Assumed
    from attnplug.registry.records import Offer

Rows = Mapping[int, Row]
"""By place in the workload."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ranked:
    """The result of ranking by tables.

    Args:
        order: the offers, the best first.
        measured: why the first one comes first; None if no table decided.
        times: microseconds of a layer's attention at `measured.shape`, of the measured offers.
        notes: tables and measurements that were not used.
    """

    order: list[Offer]
    measured: Measured | None
    times: Mapping[Offer, float]
    notes: tuple[str, ...] = ()


def rank_by_tables(
    tables: Sequence[TunedTable], order: list[Offer], placement: Placement, assumed: Assumed, *, asked: bool
) -> Ranked:
    """The offers ordered by the first table that has times of the default and this layer on this device.

    Args:
        tables: the tables, the most important first.
        order: the accepted offers by priority; the first is the default.
        placement: the layer, device and phase.
        assumed: versions to judge by instead of the installed ones.
        asked: the user named the tables, so one that does not apply is noted.
    """
    notes: list[str] = []
    key = layer_key(placement.spec)
    for table in tables:
        if not table.is_for(placement.device):
            if asked:
                theirs, ours = _words(table.device), _words(placement.device)
                notes.append(f"{table.name} has times of {theirs}, not of {ours}: not used")
            continue
        layer = table.by_key.get(key)
        if layer is None:
            if asked:
                notes.append(f"{table.name} has no times of this layer: not used")
            continue
        found = _Ranking(table, layer, order, placement, assumed).ranked()
        notes += found.notes
        if found.measured is not None:
            return dataclasses.replace(found, notes=tuple(notes))
    return Ranked(order, None, {}, tuple(notes))


def _words(device: Any) -> str:
    return f"{device} ({device.name})" if device.name else str(device)


class _Ranking:
    """The ranking of one layer by one table. Shapes are numbers here: their places in the workload."""

    def __init__(
        self, table: TunedTable, layer: TunedLayer, order: list[Offer], placement: Placement, assumed: Assumed
    ) -> None:
        self._table, self._layer, self._order = table, layer, order
        self._placement = placement
        self._assumed: Assumed = assumed
        self._shapes = layer.places_of[placement.phase]
        self._notes: list[str] = []

    def ranked(self) -> Ranked:
        """The order by this table, with `measured=None` if it says nothing about the default."""
        here = is_here(self._placement.device)
        # Offers are numbers here too, because hashing one costs as much as comparing two times.
        every = [self._rows_of(offer, here) for offer in self._order]
        rows = {place: own for place, own in enumerate(every) if own is not None}
        # A backend that failed when it was measured is no default: priority alone cannot vouch for it.
        default = next(iter(rows), None)
        if default is None or not rows[default]:
            if default is not None and any(rows.values()):
                what = f"{self._order[default].name}, the default, that applies"
                self._notes.append(f"{self._table.name} has no time of {what}: not used")
            return Ranked(self._order, None, {}, tuple(self._notes))
        own, shapes = rows[default], list(rows[default])
        if (alone := self._one_phase(shapes)) is not None:
            self._notes.append(f"{self._table.name} has times of {alone} only, not of both phases: not used")
            return Ranked(self._order, None, {}, tuple(self._notes))
        # Who was not measured at every shape of the default cannot be compared with it.
        timed = {place: found for place, found in rows.items() if found.keys() >= own.keys()}
        scores = self._scores(timed, shapes)
        by_score = sorted(timed, key=scores.__getitem__)
        winner = next(
            place
            for place in by_score
            if place == default or self._beats(timed[place], own, shapes, scores[default] / scores[place])
        )
        rest = [place for place in by_score if place != winner]
        failed = [place for place, found in enumerate(every) if found is None]
        order = [winner, *rest, *(place for place in rows if place not in timed), *failed]
        over = default if winner != default else next(iter(rest), None)
        shown = max(shapes, key=self._layer.weights.__getitem__)
        measured = Measured(
            winner == default,
            None if over is None else self._order[over].name,
            1.0 if over is None else round(scores[over] / scores[winner], 4),
            self._layer.names[shown],
            len(shapes),
            round(self._spread(timed[winner], own, shapes), 5),
            max(timed[winner][shape].date for shape in shapes)[:10],
            self._table.digest,
        )
        times = {self._order[place]: found[shown].us for place, found in timed.items()}
        return Ranked([self._order[place] for place in order], measured, times, tuple(self._notes))

    def _one_phase(self, shapes: Sequence[int]) -> Phase | None:
        """The one phase that was measured where the choice is for both; None if that is enough."""
        spec = self._placement.spec
        # The fastest backend of one phase may be the slowest of the other; an encoder has one phase only.
        if self._placement.phase is not None or spec.is_encoder or spec.direct_kv:
            return None
        phases = {self._layer.workload[shape][0].phase for shape in shapes}
        return next(iter(phases)) if len(phases) == 1 else None

    def _rows_of(self, offer: Offer, here: bool) -> Rows | None:
        """The rows of an offer that apply here, by shape; None if it failed when it was measured."""
        mine = self._layer.runs_of.get((offer.name, offer.distribution), ())
        if not mine:
            return {}
        stale = [other_version(run.subject, here=here, assumed=self._assumed) for run in mine]
        valid = [run for run, why in zip(mine, stale, strict=True) if why is None]
        if any(shape in self._shapes for run in valid for shape in run.failed):
            return None
        served, asked = serving(offer, self._placement)
        pages, _ = guarded_call(preferred_pages, served.backend, asked.spec, self._placement.device)
        run = next((run for run in valid if run.pages == pages), None)
        if run is not None:
            return {shape: run.rows[shape] for shape in self._shapes if shape in run.rows}
        what = f"{self._table.name}: {offer.name} was measured with"
        if valid:
            sizes = " or ".join(dict.fromkeys(_pages(run.pages) for run in valid))
            self._notes.append(f"{what} {sizes}, not {_pages(pages)}: not used")
        else:
            why = next(filter(None, stale), "")
            self._notes.append(f"{what} {why}: not used; run attnplug tune again")
        return {}

    def _scores(self, timed: Mapping[int, Rows], shapes: Sequence[int]) -> dict[int, float]:
        """Weighted times, each shape relative to its fastest backend, so that long steps do not hide short ones."""
        scores = dict.fromkeys(timed, 0.0)
        for shape in shapes:
            costs = {place: self._layer.cost(own[shape]) for place, own in timed.items()}
            unit = self._layer.weights[shape] / min(costs.values())
            for place, cost in costs.items():
                scores[place] += unit * cost
        return scores

    def _beats(self, own: Rows, default: Rows, shapes: Sequence[int], gain: float) -> bool:
        """Whether it is faster than the default beyond the noise, and at no shape slower beyond the noise."""
        if gain <= 1 + max(MIN_GAIN, 2 * self._spread(own, default, shapes)):
            return False
        cost = self._layer.cost
        for shape in shapes:
            noise = max(MIN_GAIN, 2 * max(own[shape].spread, default[shape].spread))
            if cost(own[shape]) > cost(default[shape]) * (1 + noise):
                return False
        return True

    def _spread(self, own: Rows, default: Rows, shapes: Sequence[int]) -> float:
        """The larger of both spreads, as a weighted mean over shapes."""
        weights = self._layer.weights
        total = sum(weights[shape] * max(own[shape].spread, default[shape].spread) for shape in shapes)
        return total / sum(weights[shape] for shape in shapes)


def _pages(pages: Any) -> str:
    return "no pages" if pages is None else f"pages of {pages[0]} tokens in {pages[1]}"
