"""The prices of shared prefixes in a tuning: a job for each layer and backend whose decodes were measured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from attnplug.core.prefix_sharing import sharing_refusal
from attnplug.core.spec import Phase
from attnplug.registry.measured.sharing_prices import MeasuredPrices, SharingPrices
from attnplug.registry.measured.tuned import TunedLayer, TunedTable, layer_key
from attnplug.registry.selection.decision import Placement
from attnplug.registry.selection.gates import serving
from attnplug.tuning.jobs import Job

if TYPE_CHECKING:
    from attnplug.tuning.cells import Contender, TuneCell
    from attnplug.tuning.session import Save, Tuner


_MOST_TIMES = 2.0
"""The time of a decode, over that of the fastest backend, above which nobody chooses a backend: it needs no prices."""


class PriceReport(NamedTuple):
    """The end of the measurement of prices.

    Args:
        table: the table with them.
        lines: for each layer and backend whose prices were fitted or failed, a sentence.
        left: the number of those that the budget left out.
    """

    table: TunedTable
    lines: list[str]
    left: int = 0


def measure_prices(
    tuner: Tuner,
    table: TunedTable,
    save: Save,
    is_late: Callable[[], bool] = lambda: False,
    *,
    fresh: bool = False,
) -> PriceReport:
    """Fit the prices of each kind of layer for the backends that are at most twice as slow as the fastest at a decode.

    Prices of equal versions that the table has are kept, and those of other backends too.

    Args:
        tuner: its layers and backends.
        table: as its `run` gave it.
        save: writes the table after each fit: it is given the change.
        is_late: whether no other fit may begin.
        fresh: fit those again that the table has.
    """
    pending, lines = list(_pending(tuner, table, fresh=fresh)), list[str]()
    jobs = [
        Job(number, cell.spec, cell.shape, ((each.offer.name, each.offer.distribution),), prices=True)
        for number, (cell, each) in enumerate(pending)
    ]
    done = 0
    if jobs and not is_late():
        for event in tuner.run_jobs(jobs):
            kind, number = event["event"], event.get("job")
            if number is None:
                continue
            cell, contender = pending[number]
            who = f"layer kind {cell.layer + 1}, shared prefixes: {contender.offer.name}"
            if kind == "failed":
                lines.append(f"{who} has no prices: {event['why']}")
            elif kind == "priced":
                prices = SharingPrices.from_dict(event["prices"])
                row = MeasuredPrices(contender.subject, prices, event["error"], event["steps"], tuner.date())
                table = save(functools.partial(_with, cell, row, table))
                lines.append(f"{who} {in_words(prices)}, {100 * row.error:.0f} % off in the median step")
            elif kind == "done":
                done += 1
                if is_late():
                    break
    return PriceReport(table, lines, len(jobs) - done)


def in_words(prices: SharingPrices) -> str:
    """The constants for people."""
    return (
        f"reads {prices.bandwidth / 1e9:,.1f} GB/s, {100 * prices.reread:.0f} % of it again for each reader, "
        f"and further calls take {prices.calls * 1e6:,.0f} us"
    )


def _pending(tuner: Tuner, table: TunedTable, *, fresh: bool) -> Iterator[tuple[TuneCell, Contender]]:
    """Each layer and backend that shares prefixes, is fast at a decode, and has no prices of its versions."""
    seen = set[tuple[int, str]]()
    for cell in tuner.cells:
        layer = table.by_key.get(layer_key(cell.spec))
        if layer is None or cell.shape.phase is not Phase.DECODE:
            continue
        rows = [row for row in layer.rows if row.is_measured and row.shape == cell.shape]
        least = min((row.us for row in rows), default=0.0)
        timed = {row.subject for row in rows if row.us <= _MOST_TIMES * least}
        priced = set() if fresh else {each.subject for each in layer.prices}
        for contender in cell.contenders:
            key, subject = (cell.layer, contender.offer.full_name), contender.subject
            if key in seen or subject not in timed or subject in priced:
                continue
            served, asked = serving(contender.offer, Placement(cell.spec, tuner.device, Phase.DECODE))
            if sharing_refusal(served.backend, asked.spec, tuner.device) is None:
                seen.add(key)
                yield cell, contender


def _with(cell: TuneCell, row: MeasuredPrices, before: TunedTable, current: TunedTable | None) -> TunedTable:
    """The table of the file, or that of before, with a row in place of that of the same backend."""
    table = before if current is None else current

    def changed(layer: TunedLayer) -> TunedLayer:
        if layer_key(layer.spec) != layer_key(cell.spec):
            return layer
        others = (each for each in layer.prices if each.subject.backend != row.subject.backend)
        return dataclasses.replace(layer, prices=(*others, row))

    return dataclasses.replace(table, layers=tuple(map(changed, table.layers)))
