"""Cells of the matrix that backends got wrong on this machine, and the layers that meet them.

A verifying run writes their file, and the selector reads it.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnplug._system import files
from attnplug._system.json_files import (
    json_problem,
    locked,
    read_document,
    remedy_for,
    unwritable,
    whole_json,
)
from attnplug.core.device import Device
from attnplug.core.dtypes import stored_dtype_name
from attnplug.core.errors import MatrixFileError
from attnplug.core.reasons import Reason
from attnplug.core.spec import Phase
from attnplug.registry.plugins.installed import BackendVersions
from attnplug.registry.plugins.switches import EVIDENCE

if TYPE_CHECKING:
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


SCHEMA = "attnplug.refuted"
VERSION = 1

_NAME = "refuted.json"
_WRONG, _RIGHT = ("refuted",), ("verified", "unclaimed")
# JSON of another form raises these where it is read.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError)
_DELETE = f"delete it and verify again, or name another file in {EVIDENCE}"
_RENAME = f"name another file in {EVIDENCE}"

Cells = dict[BackendVersions, dict[Cell, RefutedCell]]


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """The change that recording a run made.

    Args:
        path: the file.
        refuted: number of the run's cells now remembered as refuted.
        cleared: number of cells forgotten because they were right in this run.
    """

    path: Path
    refuted: int
    cleared: int


def evidence_path() -> Path:
    """The file or folder that ATTNPLUG_EVIDENCE names, else a file in the user's data folder."""
    named = os.environ.get(EVIDENCE)
    if named:
        # os.path, because pathlib raises where a home or a folder cannot be looked up.
        path = os.path.expanduser(named)  # noqa: PTH111
        return Path(path, _NAME) if os.path.isdir(path) or named.endswith(os.sep) else Path(path)  # noqa: PTH112
    from platformdirs import user_data_path

    return user_data_path("attnplug", appauthor=False) / _NAME


def read_evidence() -> Evidence:
    """All refuted cells. A file that cannot be read gives none, and `read_error` says why."""
    path = evidence_path()
    try:
        return Evidence(path, {subject: tuple(cells.values()) for subject, cells in _read(path).items()})
    except MatrixFileError as error:
        return Evidence(path, read_error=str(error))


def record(run: Mapping[str, Any]) -> Recorded:
    """Remember the refuted cells of a run, and forget those that were right in it.

    Cells that were not run change nothing, and neither does a run older than the evidence. Several
    processes may record at once.

    Args:
        run: one of the `runs` of a file of the compatibility matrix.

    Raises:
        MatrixFileError: the file has another schema, is damaged or cannot be written; or `run` is not a run.
    """
    path = evidence_path()
    subject, found = _run(path, run)
    refuted = cleared = 0
    # With nothing to remember or forget, no folder and no lock file is made.
    if not any(status in _WRONG for status, _ in found) and not _read(path):
        return Recorded(path, 0, 0)
    with locked(path, _RENAME):
        # Read again under the lock, because another process may have written in between.
        known = _read(path)
        cells = known.setdefault(subject, {})
        for status, each in found:
            before = cells.get(each.cell)
            if before is not None and _moment(before.date) > _moment(each.date):
                continue
            if status in _WRONG:
                cells[each.cell] = each
                refuted += 1
            elif before is not None:
                del cells[each.cell]
                cleared += 1
        if refuted or cleared:
            _write(path, known)
    return Recorded(path, refuted, cleared)


def forget(backend: str | None = None) -> int:
    """Forget the refuted cells of a backend, or of all; returns the number forgotten.

    Raises:
        MatrixFileError: the file has another schema, is damaged or cannot be written.
    """
    path = evidence_path()
    if not _read(path):
        return 0
    with locked(path, _RENAME):
        known = _read(path)
        kept = {each: cells for each, cells in known.items() if backend not in (None, each.backend)}
        forgotten = sum(map(len, known.values())) - sum(map(len, kept.values()))
        if forgotten:
            _write(path, kept)
    return forgotten


def _write(path: Path, known: Cells) -> None:
    runs = [_text(subject, cells) for subject, cells in known.items() if cells]
    listed = "\n" + ",\n".join(runs) + "\n" if runs else ""
    try:
        files.write_text(path, f'{{"schema": "{SCHEMA}", "version": {VERSION}, "runs": [{listed}]}}\n')
    except OSError as problem:
        raise unwritable(path, problem, _RENAME) from None


def _text(subject: BackendVersions, cells: Mapping[Cell, RefutedCell]) -> str:
    about = {
        **{name: getattr(subject, name) for name in ("backend", "distribution", "version")},
        "device": str(subject.device),
        "device_name": subject.device.name,
        "versions": dict(subject.versions),
    }
    lines = ",\n".join(
        whole_json(
            json.dumps({**dataclasses.asdict(cell), "date": each.date, "why": each.why}, ensure_ascii=False)
        )
        for cell, each in cells.items()
    )
    return f'{json.dumps(about)[:-1]}, "cells": [\n{lines}]}}'


def _read(path: Path) -> Cells:
    """The contents of a file, empty if it is missing; MatrixFileError for other contents."""
    try:
        data = read_document(path, SCHEMA, VERSION, remedy_for(path, _DELETE, _RENAME))
    except FileNotFoundError:
        return {}
    try:
        return {
            _subject(run): {each.cell: each for each in (_refuted_cell(c, c["date"]) for c in run["cells"])}
            for run in data["runs"]
        }
    except _MALFORMED as problem:
        raise MatrixFileError(
            path, f"cannot be made sense of: {json_problem(problem)}", remedy_for(path, _DELETE, _RENAME)
        ) from None


def _run(path: Path, run: Mapping[str, Any]) -> tuple[BackendVersions, list[tuple[str, RefutedCell]]]:
    """The subject of a run, and the status of each cell that was run."""
    try:
        was_run = [each for each in run["cells"] if each["status"] in (*_WRONG, *_RIGHT)]
        return _subject(run), [(each["status"], _refuted_cell(each, run["date"])) for each in was_run]
    except _MALFORMED as problem:
        raise MatrixFileError(path, f"cannot take the run in: {json_problem(problem)}") from None


def _subject(data: Mapping[str, Any]) -> BackendVersions:
    device = Device.parse(data["device"])
    return BackendVersions(
        backend=_typed(data, "backend", str),
        distribution=_optional(data, "distribution"),
        version=_optional(data, "version"),
        device=Device(device.type, device.capability, _optional(data, "device_name")),
        versions=tuple(sorted((str(name), str(each)) for name, each in data["versions"].items())),
    )


def _refuted_cell(data: Mapping[str, Any], date: str) -> RefutedCell:
    # Called for its error: an unreadable date would otherwise raise in a later comparison.
    _moment(date)
    cell = Cell(
        block_size=_optional(data, "block_size", int),
        head_size=_typed(data, "head_size", int),
        **{name: _typed(data, name, str) for name in ("feature", "phase", "dtype", "kv_cache_dtype")},
        layout=_optional(data, "layout"),
    )
    return RefutedCell(cell, date, tuple(map(str, _typed(data, "why", list))))


def _moment(date: Any) -> dt.datetime:
    """The time of a date; one without an offset is in UTC."""
    moment = dt.datetime.fromisoformat(date)
    return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)


def _optional(data: Mapping[str, Any], name: str, kind: type[Any] = str) -> Any:
    return None if data[name] is None else _typed(data, name, kind)


def _typed(data: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    value = data[name]
    if type(value) is not kind:
        raise TypeError(f"{name} is {value!r:.60}")
    return value
