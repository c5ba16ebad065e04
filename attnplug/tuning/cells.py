"""What a tuning measures, reports to its observer, and gives at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from attnplug.core.spec import LayerSpec
    from attnplug.registry.measured.step_shapes import StepShape
    from attnplug.registry.measured.tuned import Row, TunedTable
    from attnplug.registry.plugins.backend_versions import BackendVersions
    from attnplug.registry.plugins.records import Offer
    from attnplug.registry.selection.evidence import Pages
    from attnplug.tuning.workloads import Workload


@dataclasses.dataclass(frozen=True, slots=True)
class Contender:
    """One backend for one cell: its offer, the versions that its times are valid for, and its pages."""

    offer: Offer
    subject: BackendVersions
    pages: Pages


@dataclasses.dataclass(frozen=True, slots=True)
class TuneCell:
    """One layer at one step, with the backends that serve it; the first is the default."""

    layer: int
    spec: LayerSpec
    shape: StepShape
    weight: float
    contenders: tuple[Contender, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of a model that are alike, and the shapes that they meet."""

    spec: LayerSpec
    names: tuple[str, ...]
    workload: Workload


class Observer(Protocol):
    """Receives the progress of a tuning."""

    def planned(self, kept: int, pending: int) -> None:
        """The numbers of cells that an earlier run has measured, and of the others."""

    def checking(self, backend: str, cells: int) -> None:
        """A backend is about to run `cells` cells once."""

    def machine(self, environment: Mapping[str, str]) -> None:
        """The facts about the machine, before it is measured."""

    def started(self, cell: TuneCell) -> None:
        """A cell is about to be measured."""

    def finished(self, cell: TuneCell, rows: Sequence[Row]) -> None:
        """A cell has its rows; those of an earlier run are not told."""

    def wrong(self, contender: Contender, spec: LayerSpec, row: Row, feature: str | None) -> None:
        """A backend gave a wrong output; `feature` is the one at fault, or None if only its timed calls are wrong."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """The end of a tuning.

    Args:
        table: with all layers that the file has.
        measured: cells that were measured now.
        kept: cells whose times an earlier run has measured.
        left: cells that the budget left out.
        compiled: seconds of each backend's first calls, most of which is compilation.
        left_out: the layers that cannot be measured, and why.
    """

    table: TunedTable
    measured: list[TuneCell]
    kept: list[TuneCell]
    left: list[TuneCell]
    compiled: dict[str, float]
    left_out: dict[str, str]
