"""The cells and contenders of a tuning, its reports to an observer, and its outcome.

Also the versions for which a time is valid, facts about this machine, and wrong outputs as refuted cells.
"""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.plugins.installed import BackendVersions, installed_versions, library_versions
from attnplug.registry.selection.decision import Placement
from attnplug.registry.selection.evidence import Recorded, record
from attnplug.registry.selection.gates import preferred_pages, serving
from attnplug.testing.isolation.listing import versions

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.registry.measured.step_shapes import StepShape
    from attnplug.registry.measured.tuned import TimedRow, TunedTable
    from attnplug.registry.plugins.records import Offer
    from attnplug.registry.registry import Registry
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
    """Equal layers of a model, and the shapes that they meet."""

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

    def finished(self, cell: TuneCell, rows: Sequence[TimedRow]) -> None:
        """A cell has its rows; those of an earlier run are not told."""

    def wrong(self, contender: Contender, spec: LayerSpec, row: TimedRow, feature: str | None) -> None:
        """A backend gave a wrong output; `feature` is the one at fault, or None if only its timed calls are wrong."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """The end of a tuning.

    Args:
        table: with all layers that the file has.
        measured: cells that were measured now.
        kept: cells whose times an earlier run has measured.
        left: cells that the budget left out.
        compiled: seconds of each backend's first calls, mostly compilation.
        left_out: the layers that cannot be measured, and why.
    """

    table: TunedTable
    measured: list[TuneCell]
    kept: list[TuneCell]
    left: list[TuneCell]
    compiled: dict[str, float]
    left_out: dict[str, str]


_CONTEXT = 2 << 30
"""The memory of a GPU that the context and libraries of one process take at most."""


def subject_of(offer: Offer, device: Device) -> BackendVersions:
    """A backend with the versions of torch, its distribution and the distributions that it requires."""
    # Python's version is not among them: it changes no kernel.
    versions = tuple(sorted(library_versions(offer).items()))
    return BackendVersions(offer.name, offer.distribution, offer.version, device, versions)


def environment() -> dict[str, str]:
    """Names and versions of this machine. It imports torch if another module has."""
    found = {"Python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
    found |= installed_versions(("attnplug", "torch", "triton"))
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        about = torch.cuda.get_device_properties(torch.cuda.current_device())
        found |= {"CUDA": str(torch.version.cuda), "multiprocessors": str(about.multi_processor_count)}
        found["memory"] = f"{about.total_memory >> 30} GiB"
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        if others > _CONTEXT:
            found["held by other processes"] = f"{others / 2**30:.1f} GiB"
    return found


def contenders(
    registry: Registry, device: Device, spec: LayerSpec, phase: Phase | None, names: Collection[str] | None
) -> tuple[Contender, ...]:
    """The accepted backends in the order of their priority; of the others than the first, those in `names`."""
    plugins = registry.plugins
    offers = {(offer.name, offer.distribution): offer for offer in plugins.offers}
    wanted = None if names is None else {offer for name in names for offer in plugins.find(name)}
    found: list[Contender] = []
    for candidate in registry.explain(spec, device, phase, tuned=False).candidates:
        # A rule of the user may name a composite, which no plugin offers.
        offer = offers.get((candidate.name, candidate.distribution))
        if not candidate.accepted or offer is None:
            continue
        if not found or wanted is None or offer in wanted:
            found.append(_contender(offer, Placement(spec, device, phase)))
    return tuple(found)


def composites(
    registry: Registry, device: Device, spec: LayerSpec, table: TunedTable
) -> tuple[Contender, ...]:
    """The composite of the backends that a table chooses for the phases; none if they cannot share one KV cache."""
    best = [
        registry.explain(spec, device, phase, tuned=table).backend for phase in (Phase.PREFILL, Phase.DECODE)
    ]
    if None in best or best[0] == best[1]:
        return ()
    pairs = registry.plugins.find(f"{best[0]}+{best[1]}")
    serves = [offer for offer in pairs if registry.explain(spec, device, backend=offer.name, tuned=False)]
    return tuple(_contender(offer, Placement(spec, device)) for offer in serves)


def _contender(offer: Offer, placement: Placement) -> Contender:
    served, asked = serving(offer, placement)
    pages = preferred_pages(served.backend, asked.spec, placement.device)
    return Contender(offer, subject_of(offer, placement.device), pages)


def record_wrong(contender: Contender, spec: LayerSpec, row: TimedRow, feature: str) -> Recorded:
    """Remember the cell of a wrong output; MatrixFileError where the file of refuted cells cannot be written."""
    offer, device = contender.offer, contender.subject.device
    cell = {
        "feature": feature,
        "phase": str(row.shape.phase or "mixed"),
        "head_size": spec.head_size,
        "dtype": spec.dtype,
        "kv_cache_dtype": spec.kv_cache_dtype,
        "block_size": row.pages and row.pages[0],
        "layout": row.pages and row.pages[1],
        "status": "refuted",
        "why": [f"at {row.shape}: {row.why}"],
    }
    return record(
        {
            "backend": offer.name,
            "distribution": offer.distribution,
            "version": offer.version,
            "device": str(device),
            "device_name": device.name,
            "versions": versions(offer),
            "date": row.date,
            "commit": None,
            "cells": [cell],
        }
    )
