"""The file of refuted cells: a verifying run writes it, the selector reads it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from attnplug.core.errors import MatrixFileError
from attnplug.registry.plugins.backend_versions import BackendVersions
from attnplug.registry.plugins.switches import EVIDENCE
from attnplug.registry.selection.evidence import Cell, Evidence, RefutedCell

SCHEMA = "attnplug.refuted"
VERSION = 1

_NAME = "refuted.json"
_WRONG, _RIGHT = ("refuted",), ("verified", "unclaimed")
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError)
"""Raised by reading JSON of another form."""
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
    """The contents of a file, empty if there is no file; MatrixFileError for other contents."""
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
