"""Cells of the matrix that backends got wrong on this machine, and the layers that meet them."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from attnplug.core.device import same_gpu_name
from attnplug.core.dtypes import stored_dtype_name
from attnplug.core.reasons import Reason
from attnplug.core.spec import Phase
from attnplug.registry.installed import installed_version
from attnplug.registry.records import COMPOSITE_SEPARATOR, canonical_name, joined

if TYPE_CHECKING:
    from pathlib import Path

    from attnplug.core.device import Device
    from attnplug.registry.decision import Placement
    from attnplug.registry.installed import Assumed
    from attnplug.registry.records import Offer

_PHASES = {None: ("prefill", "decode", "mixed"), Phase.PREFILL: ("prefill",), Phase.DECODE: ("decode",)}
"""The batches that a layer meets in a phase; None means both phases."""
_PLAIN = "plain"

Pages = tuple[int, str] | None
"""Tokens per page and its layout; None where K and V are arguments of the call."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the compatibility matrix: a value of every axis.

    Args:
        feature: lower-case name of a Feature that the layer asks for, or "plain" for none.
        phase: what the batch holds: "prefill", "decode" or "mixed".
        head_size: of queries and keys, in elements.
        dtype: bare name of the queries' dtype, such as "bfloat16".
        kv_cache_dtype: as `LayerSpec.kv_cache_dtype`, "auto" for that of the queries.
        block_size: tokens per page; None where the layer has no pages.
        layout: physical order of the cache, "NHD" or "HND"; None where the layer has no pages.
    """

    feature: str
    phase: str
    head_size: int
    dtype: str
    kv_cache_dtype: str
    block_size: int | None
    layout: str | None

    @property
    def id(self) -> str:
        """All values in a fixed order: "sinks/decode/d128/bfloat16/auto/b16/NHD"."""
        pages = ("direct",) if self.block_size is None else (f"b{self.block_size}", str(self.layout))
        return "/".join(
            [self.feature, self.phase, f"d{self.head_size}", self.dtype, self.kv_cache_dtype, *pages]
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """One backend on one device with given versions; evidence is valid for exactly these.

    Args:
        backend: its name.
        distribution: its distribution.
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
        """Whether the offer has the same backend, distribution and version."""
        theirs = (offer.name, offer.distribution, offer.version)
        return (self.backend, self.distribution, self.version) == theirs

    @property
    def is_installed(self) -> bool:
        """Whether that version of its distribution is installed; true where it has no distribution."""
        names = [] if self.distribution is None else self.distribution.split(COMPOSITE_SEPARATOR)
        return not names or joined(map(installed_version, names)) == self.version

    def is_on(self, device: Device, assumed: Assumed = None) -> bool:
        """Whether it was run on an equal device, with the versions installed now, or assumed instead."""
        mine = self.device
        return (
            (mine.type, mine.capability) == (device.type, device.capability)
            # A device of unknown name may be the same one, so the evidence stays valid.
            and (mine.name is None or device.name is None or same_gpu_name(mine.name, device.name))
            and all(_version(name, assumed) == version for name, version in self.versions)
        )


def _version(name: str, assumed: Assumed) -> str | None:
    if name == "Python":
        return platform.python_version()
    # A what-if query may leave a version open, such as torch's: then the installed one counts.
    known = dict(assumed).get(canonical_name(name)) if isinstance(assumed, tuple) else None
    return installed_version(name) if known is None else known


@dataclasses.dataclass(frozen=True, slots=True)
class RefutedCell:
    """One cell of the matrix that was run and was wrong.

    Args:
        cell: its place in the matrix.
        date: when it was run, with its offset from UTC.
        why: the evidence.
    """

    cell: Cell
    date: str
    why: tuple[str, ...]

    @property
    def id(self) -> str:
        """The id of the cell."""
        return self.cell.id

    def concerns(self, placement: Placement, pages: Pages) -> bool:
        """Whether a layer meets the cell: the same sizes, types and pages, and it asks for the feature."""
        cell, spec = self.cell, placement.spec
        return (
            cell.phase in _PHASES[placement.phase]
            and (cell.head_size, cell.dtype) == (spec.head_size, spec.dtype)
            and stored_dtype_name(cell.kv_cache_dtype, cell.dtype) == spec.resolved_kv_cache_dtype
            and (cell.block_size, cell.layout) == (pages or (None, None))
            and (cell.feature == _PLAIN or cell.feature in spec.required_features().names())
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Evidence:
    """All refuted cells that are remembered.

    Args:
        path: the file.
        cells: the refuted cells of each subject.
        read_error: why the file exists and cannot be read, else None.
    """

    path: Path
    cells: Mapping[Subject, tuple[RefutedCell, ...]] = dataclasses.field(default_factory=dict)
    read_error: str | None = None

    def here(self, device: Device) -> Iterator[tuple[Subject, tuple[RefutedCell, ...]]]:
        """The evidence that is valid on a device with the versions installed now, the backends' included."""
        for subject, cells in self.cells.items():
            if subject.is_installed and subject.is_on(device):
                yield subject, cells

    def against(
        self, offer: Offer, placement: Placement, pages: Pages, assumed: Assumed = None
    ) -> tuple[RefutedCell, ...]:
        """The refuted cells that a layer would meet on an offer, the latest first.

        Args:
            offer: the backend and its distribution.
            placement: the layer, device and phase.
            pages: the block size and layout of its cache.
            assumed: versions to judge by instead of the installed ones.
        """
        found = [
            cell
            for subject, cells in self.cells.items()
            if subject.is_of(offer) and subject.is_on(placement.device, assumed)
            for cell in cells
            if cell.concerns(placement, pages)
        ]
        return tuple(sorted(found, key=lambda cell: cell.date, reverse=True))


def reason_of(backend: str, cells: Sequence[RefutedCell]) -> Reason:
    """The reason for refuted cells: the first of them, the number of others, and the remedy."""
    first = cells[0]
    # Evidence may have several lines, and a reason is one sentence.
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
