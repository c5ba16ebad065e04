"""Regret: how much slower a choice is than the best backend of each cell, for priorities and for tables."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from attnplug.registry.measured.tuned import TunedLayer, TunedTable
from attnplug.registry.plugins.records import COMPOSITE_SEPARATOR

if TYPE_CHECKING:
    from attnplug.registry.measured.step_shapes import StepShape
    from attnplug.registry.plugins.installed import AssumeInstalled
    from attnplug.registry.registry import Registry, SelectKwargs

PRIORITIES = "priorities"


@dataclasses.dataclass(frozen=True, slots=True)
class CellRegret:
    """One cell: the time of each backend, and the choice of each policy.

    Args:
        layer: place of the layer in the measured table.
        shape: the step.
        costs: microseconds of the step for all layers of the kind, with one build, by backend.
        chosen: the backend that each policy chooses.
    """

    layer: int
    shape: StepShape
    costs: Mapping[str, float]
    chosen: Mapping[str, str]

    @property
    def best(self) -> str:
        """The fastest backend."""
        return min(self.costs, key=self.costs.__getitem__)

    def regret(self, policy: str) -> float:
        """Time of the choice over that of the best, minus 1."""
        return self.costs[self.chosen[policy]] / self.costs[self.best] - 1

    def over_default(self, policy: str) -> float:
        """Time of the choice over that of the priorities' choice, minus 1."""
        return self.costs[self.chosen[policy]] / self.costs[self.chosen[PRIORITIES]] - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """The regret of a policy over all cells, and the most that it is slower than the priorities."""

    policy: str
    cells: int
    mean: float
    p95: float
    worst: float
    over_default: float


def regrets(
    registry: Registry,
    found: TunedTable,
    tables: Mapping[str, TunedTable],
    *,
    assume_installed: AssumeInstalled = None,
) -> list[CellRegret]:
    """The choices of the priorities and of tables, compared at the times that `found` has measured.

    Each table has two policies: its name, one choice for each layer and phase; and "its name, nearest shape", the choice
    by its shape nearest to that of the cell. A cell whose choice was not measured is left out.

    For times of another machine, `assume_installed` has the versions there: see `versions_of`.
    """

    def choice(layer: TunedLayer, shape: StepShape, tuned: TunedTable | Literal[False]) -> str | None:
        asked: SelectKwargs = {"tuned": tuned, "assume_installed": assume_installed}
        return registry.explain(layer.spec, found.device, shape.phase, **asked).backend

    cells = []
    for place, layer in enumerate(found.layers):
        for shape, _ in layer.workload:
            costs = _costs(layer, shape)
            chosen = {PRIORITIES: choice(layer, shape, False)}
            for name, table in tables.items():
                chosen[name] = choice(layer, shape, table)
                chosen[f"{name}, nearest shape"] = choice(layer, shape, table.at(shape))
            if costs and all(each in costs for each in chosen.values()):
                cells.append(CellRegret(place, shape, costs, {k: str(v) for k, v in chosen.items()}))
    return cells


def _costs(layer: TunedLayer, shape: StepShape) -> dict[str, float]:
    rows = (row for row in layer.rows if row.shape == shape and row.is_measured)
    # One choice is one backend: plans compare composites.
    return {
        row.subject.backend: layer.cost(row) for row in rows if COMPOSITE_SEPARATOR not in row.subject.backend
    }


def versions_of(table: TunedTable) -> dict[str, str]:
    """The versions of all libraries that a table was measured with."""
    rows = (row for layer in table.layers for row in layer.rows)
    return {name: version for row in rows for name, version in row.subject.versions}


def summaries(cells: Sequence[CellRegret]) -> list[Summary]:
    """The summary of each policy; empty without cells."""
    found = []
    for policy in cells[0].chosen if cells else ():
        values = sorted(cell.regret(policy) for cell in cells)
        # The smallest value that at least 95 % of the cells do not exceed.
        p95 = values[max(0, -(-95 * len(values) // 100) - 1)]
        worst = max(cell.over_default(policy) for cell in cells)
        found.append(Summary(policy, len(values), statistics.fmean(values), p95, values[-1], worst))
    return found
