"""The ranking by measured times: it reorders accepted candidates, and adds none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attnplug.registry.devices import is_here
from attnplug.registry.measured.tuned import layer_key
from attnplug.registry.selection.decision import Placement

if TYPE_CHECKING:
    from attnplug.registry.measured.comparisons import Measured, PhaseTimes, Run
    from attnplug.registry.measured.tuned import TunedTable
    from attnplug.registry.measured.tuned_lookup import Tables
    from attnplug.registry.plugins.installed import Assumed
    from attnplug.registry.plugins.records import Offer
    from attnplug.registry.selection.decision import Candidate, Decision
    from attnplug.registry.selection.evidence import Pages


# Not frozen, because making a frozen one takes twice as long.
@dataclasses.dataclass(slots=True)
class Ranked:
    """The result of ranking by tables, and by plugins.

    Args:
        order: the offers, the best first.
        measured: why the first one comes first; None if no table decided.
        times: microseconds of a layer's attention at `measured.shape`, of the measured offers.
        notes: tables and measurements that were not used.
        ranked_by: the plugins that reordered the offers.
    """

    order: list[Offer]
    measured: Measured | None = None
    times: Sequence[tuple[Offer, float]] = ()
    notes: tuple[str, ...] = ()
    ranked_by: tuple[str, ...] = ()


def rank_by_tables(
    tables: Tables, order: list[Offer], pages: Sequence[Pages], placement: Placement, assumed: Assumed
) -> Ranked:
    """The offers ordered by the first table that has times of the default and this layer on this device.

    Args:
        tables: the tables, the most important first.
        order: the accepted offers by priority; the first is the default.
        pages: the pages that each offer prefers, in the same order.
        placement: the layer, device and phase.
        assumed: versions to judge by instead of the installed ones.
    """
    notes: list[str] = []
    key = layer_key(placement.spec)
    for table in tables.tables:
        if tables.borrowed:
            return _borrowed(table, order, pages, placement, assumed)
        if not table.is_for(placement.device):
            if tables.asked:
                theirs, ours = _words(table.device), _words(placement.device)
                notes.append(f"{table.name} has times of {theirs}, not of {ours}: not used")
            continue
        layer = table.times.get(key)
        if layer is None:
            if tables.asked:
                notes.append(f"{table.name} has no times of this layer: not used")
            continue
        others = table.other_versions(here=is_here(placement.device), assumed=assumed)
        applying = TableForLayer(table, layer[placement.phase], placement, others, notes)
        found = _ranked(applying, order, pages)
        applying.note_stale()
        if found is not None:
            return dataclasses.replace(found, notes=tuple(notes)) if notes else found
    return Ranked(order, notes=tuple(notes))


BORROWED_GAIN = 1.15
"""A ratio of another GPU counts above it: equal kernels have other shares of bandwidth and of arithmetic there."""


def _borrowed(
    table: TunedTable, order: list[Offer], pages: Sequence[Pages], placement: Placement, assumed: Assumed
) -> Ranked:
    """The order by times of another GPU, where the first beats the default by far; else that of priorities."""
    layer = table.times.get(layer_key(placement.spec))
    if layer is None:
        return Ranked(order)
    others = table.other_versions(here=is_here(placement.device), assumed=assumed)
    # Rows that do not apply say nothing, because nobody named this table.
    found = _ranked(TableForLayer(table, layer[placement.phase], placement, others, []), order, pages)
    if found is None or found.measured is None or found.measured.is_default:
        return Ranked(order)
    ratio = found.measured.ratio
    if ratio < BORROWED_GAIN:
        return Ranked(order)
    theirs, ours = _words(table.device), _words(placement.device)
    why = f"{table.name} has times of {theirs}: used on {ours}, because the ratio {ratio:.2f} is above {BORROWED_GAIN}"
    return dataclasses.replace(found, notes=(why,))


def _ranked(applying: TableForLayer, order: list[Offer], pages: Sequence[Pages]) -> Ranked | None:
    """The order by one table; None if it says nothing about the default. Backends that failed come last, with times or without."""
    runs: dict[int, Offer] = {}
    default, others, failed = None, [], []
    for offer, preferred in zip(order, pages, strict=True):
        run = applying.run_of(offer, preferred)
        # A backend that failed when it was measured cannot be the default: priority alone cannot vouch for it.
        if run is not None and run.failed:
            failed.append(offer)
        elif run is None or not run.rows:
            if not runs:
                default = default or offer
            others.append(offer)
        else:
            runs[run.number] = offer
    if order[0] in failed:
        applying.note(f"has {order[0].name}, the first by priority, as wrong or crashed: it comes last")
    if not runs:
        return _unranked(order, failed)
    if default is not None:
        applying.note(f"has no time of {default.name}, the default, that applies: not used")
        return _unranked(order, failed)
    found = applying.times.comparison(next(iter(runs)), sorted(runs))
    # The fastest backend of one phase may be the slowest of the other.
    if found.alone is not None and applying.needs_both_phases:
        applying.note(f"has times of {found.alone} only, not of both phases: not used")
        return _unranked(order, failed)
    ranked = [runs.pop(number) for number in found.order]
    times = tuple(zip(ranked, found.times, strict=True))
    if runs:
        others = [offer for offer in order if offer in others or offer in runs.values()]
    return Ranked([*ranked, *others, *failed], found.measured, times)


def _unranked(order: list[Offer], failed: list[Offer]) -> Ranked | None:
    """Without times to compare, priorities order those that did not fail."""
    return Ranked([*(offer for offer in order if offer not in failed), *failed]) if failed else None


def failed_together(tables: Tables, composite: Decision) -> str | None:
    """Why a composite does not serve a layer: it was wrong or crashed when a table measured it. None if it may serve.

    Args:
        tables: the tables, the most important first.
        composite: the decision for a composite.
    """
    placement = Placement(composite.spec, composite.device)
    for table in tables.tables:
        layer = table.times.get(layer_key(composite.spec)) if table.is_for(composite.device) else None
        if layer is None or composite.chosen is None:
            continue
        others = table.other_versions(here=is_here(composite.device), assumed=composite.assumed)
        found = TableForLayer(table, layer[None], placement, others, []).run_of(
            composite.chosen, composite.pages
        )
        if found is not None:
            return f"{composite.backend} was wrong or crashed when it was measured" if found.failed else None
    return None


def _words(device: Any) -> str:
    return f"{device} ({device.name})" if device.name else str(device)


@dataclasses.dataclass(slots=True)
class TableForLayer:
    """Finds the rows of one table that apply to a layer, and notes why others do not."""

    table: TunedTable
    times: PhaseTimes
    placement: Placement
    others: Mapping[int, str | None]
    notes: list[str]
    stale: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    @property
    def needs_both_phases(self) -> bool:
        """Whether the choice is for both phases; an encoder has one phase only."""
        spec = self.placement.spec
        return self.placement.phase is None and not (spec.is_encoder or spec.direct_kv)

    def note(self, what: str) -> None:
        """Note something about the table."""
        self.notes.append(f"{self.table.name} {what}")

    def run_of(self, offer: Offer | Candidate, pages: Pages) -> Run | None:
        """The run of an offer that applies here; a failed one comes before all others."""
        mine = self.times.by_owner.get((offer.name, offer.distribution))
        if mine is None:
            return None
        stale, found = "", None
        valid: list[Run] = []
        for run in mine:
            why = self.others[id(run.subject)]
            if why is not None:
                stale = stale or why
                continue
            if run.failed:
                return run
            valid.append(run)
            if found is None and run.pages == pages:
                found = run
        if found is not None:
            return found
        if valid:
            sizes = " or ".join(dict.fromkeys(_pages(run.pages) for run in valid))
            what = f"{self.table.name}: {offer.name} was measured with {sizes}"
            self.notes.append(f"{what}, not {_pages(pages)}: not used")
        else:
            self.stale.setdefault(stale, []).append(offer.name)
        return None

    def note_stale(self) -> None:
        """Note the rows of other versions, those of one library together."""
        for why, names in self.stale.items():
            *most, last = names
            who = f"{', '.join(most)} and {last} were" if most else f"{last} was"
            self.notes.append(
                f"{self.table.name}: {who} measured with {why}: not used; run attnplug tune again"
            )


def _pages(pages: Any) -> str:
    return "no pages" if pages is None else f"pages of {pages[0]} tokens in {pages[1]}"
