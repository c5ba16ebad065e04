"""What running backends on this machine has refuted, and which layers that speaks against."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from attnplug.core.dtypes import stored_dtype_name
from attnplug.core.features import Feature
from attnplug.core.reasons import Reason
from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.cell import Cell
from attnplug.registry.installed import installed_version
from attnplug.registry.records import JOIN, canonical_name, joined

if TYPE_CHECKING:
    from pathlib import Path

    from attnplug.core.device import Device
    from attnplug.registry.installed import Assumed
    from attnplug.registry.records import Offer

__all__ = ["Evidence", "RefutedCell", "Subject", "reason_of"]

_PHASES = {None: ("prefill", "decode", "mixed"), Phase.PREFILL: ("prefill",), Phase.DECODE: ("decode",)}
"""The batches that a layer meets in the phase asked about."""
_PLAIN = "plain"

Pages = tuple[int, str] | None
"""Tokens per page and the physical order in it; None where K and V come with the call."""


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """What was run, where and with what: evidence holds for exactly this.

    Args:
        backend: its name.
        distribution: what ships it.
        version: of that distribution.
        device: type, capability and, where it is known, name.
        versions: of Python and of distributions, as installed then.
    """

    backend: str
    distribution: str | None
    version: str | None
    device: Device
    versions: tuple[tuple[str, str], ...]

    def is_of(self, offer: Offer) -> bool:
        """Whether the offer is what was run."""
        return (self.backend, self.distribution, self.version) == (
            offer.name,
            offer.distribution,
            offer.version,
        )

    @property
    def is_installed(self) -> bool:
        """Whether that version of what ships it is installed; true of what nothing ships."""
        names = [] if self.distribution is None else self.distribution.split(JOIN)
        return not names or joined(map(installed_version, names)) == self.version

    def is_on(self, device: Device, assumed: Assumed = None) -> bool:
        """Whether it was run on such a device, with the versions installed now, or assumed instead."""
        mine = self.device
        return (
            (mine.type, mine.capability) == (device.type, device.capability)
            and (mine.name is None or device.name in (None, mine.name))
            and all(_version(name, assumed) == version for name, version in self.versions)
        )


def _version(name: str, assumed: Assumed) -> str | None:
    if name == "Python":
        return platform.python_version()
    # What a what-if query leaves open, torch say, is what runs here.
    known = dict(assumed).get(canonical_name(name)) if isinstance(assumed, tuple) else None
    return installed_version(name) if known is None else known


@dataclasses.dataclass(frozen=True, slots=True)
class RefutedCell:
    """One cell of the matrix that was run and was wrong.

    Args:
        cell: what was asked.
        date: when it was run, with its offset from UTC.
        why: the evidence.
    """

    cell: Cell
    date: str
    why: tuple[str, ...]

    @property
    def id(self) -> str:
        """The cell's."""
        return self.cell.id

    def concerns(self, spec: LayerSpec, phase: Phase | None, pages: Pages) -> bool:
        """Whether a layer meets the cell: the same sizes, types and pages, and it asks for the feature."""
        cell = self.cell
        return (
            cell.phase in _PHASES[phase]
            and (cell.head_size, cell.dtype) == (spec.head_size, spec.dtype)
            and stored_dtype_name(cell.kv_cache_dtype, cell.dtype) == spec.resolved_kv_cache_dtype
            and (cell.block_size, cell.layout) == (pages or (None, None))
            and (cell.feature == _PLAIN or self._is_asked_by(spec))
        )

    def _is_asked_by(self, spec: LayerSpec) -> bool:
        feature = Feature.__members__.get(self.cell.feature.upper())
        return feature is not None and feature in spec.required_features()


@dataclasses.dataclass(frozen=True, slots=True)
class Evidence:
    """Everything refuted that is remembered.

    Args:
        path: where it is kept.
        cells: the refuted cells of each subject.
        read_error: why the file cannot be read, where it is there and cannot.
    """

    path: Path
    cells: Mapping[Subject, tuple[RefutedCell, ...]] = dataclasses.field(default_factory=dict)
    read_error: str | None = None

    def here(self, device: Device) -> Iterator[tuple[Subject, tuple[RefutedCell, ...]]]:
        """What holds on a device with the versions installed now, those of the backends themselves included."""
        for subject, cells in self.cells.items():
            if subject.is_installed and subject.is_on(device):
                yield subject, cells

    def against(
        self,
        offer: Offer,
        spec: LayerSpec,
        device: Device,
        phase: Phase | None,
        pages: Pages,
        assumed: Assumed = None,
    ) -> tuple[RefutedCell, ...]:
        """The refuted cells that a layer would meet on what is offered, the latest first.

        Args:
            offer: the backend, and who ships it.
            spec: the layer.
            device: the device asked about.
            phase: the phase asked about; None for both.
            pages: the block size and layout it would be served with.
            assumed: versions to go by instead of the installed ones.
        """
        found = [
            cell
            for subject, cells in self.cells.items()
            if subject.is_of(offer) and subject.is_on(device, assumed)
            for cell in cells
            if cell.concerns(spec, phase, pages)
        ]
        return tuple(sorted(found, key=lambda cell: cell.date, reverse=True))


def reason_of(backend: str, cells: Sequence[RefutedCell]) -> Reason:
    """Why nothing like the refuted cells is given to the backend: the first of them, how many more, the way out."""
    first = cells[0]
    why = " ".join("; ".join(first.why).split())
    more = f" (and {len(cells) - 1} more like it)" if len(cells) > 1 else ""
    return Reason(
        f"refuted when {backend} was run here on {first.date[:10]}",
        code="refuted",
        requested=f"{first.id}{f': {why}' if why else ''}{more}",
        remedy=(
            f"run it again with attnplug matrix --verify --backend {backend}, "
            f"or have it all the same with --allow-refuted {backend}"
        ),
    )
