"""Cells of the matrix that backends got wrong on this machine, and the layers that meet them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from attnplug.core.dtypes import stored_dtype_name
from attnplug.core.reasons import Reason
from attnplug.core.spec import Phase
from attnplug.registry.plugins.backend_versions import BackendVersions

if TYPE_CHECKING:
    from pathlib import Path

    from attnplug.core.device import Device
    from attnplug.registry.plugins.installed import Assumed
    from attnplug.registry.plugins.records import Offer
    from attnplug.registry.selection.decision import Placement

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
    cells: Mapping[BackendVersions, tuple[RefutedCell, ...]] = dataclasses.field(default_factory=dict)
    read_error: str | None = None

    def here(self, device: Device) -> Iterator[tuple[BackendVersions, tuple[RefutedCell, ...]]]:
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
