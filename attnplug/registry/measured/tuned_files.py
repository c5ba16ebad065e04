"""The files of measured times: read strictly, and written whole."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnplug._system import files
from attnplug._system.json_files import (
    json_problem,
    locked,
    read_document,
    remedy_for,
    typed,
    unreadable,
    unwritable,
    whole_json,
)
from attnplug.core.device import Device
from attnplug.core.errors import MatrixFileError
from attnplug.core.spec import LayerSpec
from attnplug.registry.measured.sharing_prices import MeasuredPrices, SharingPrices
from attnplug.registry.measured.step_shapes import StepShape
from attnplug.registry.measured.tuned import (
    SCHEMA,
    VERSION,
    RowStatus,
    TimedRow,
    TunedLayer,
    TunedTable,
    layer_key,
)
from attnplug.registry.plugins.installed import BackendVersions
from attnplug.registry.plugins.records import COMPOSITE_SEPARATOR

if TYPE_CHECKING:
    from attnplug.registry.selection.evidence import Pages


_LEAST_US, _MOST_US = 1e-3, 1e12
# With figures in these limits, no comparison of them overflows.
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-6, 1e6
_MOST_LAYERS = 100_000
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
_REMEDY = "measure again with attnplug tune, or leave the table out with --no-tuned"
_OTHER_FILE = "name another file with --output"
_INSTEAD = f"{_OTHER_FILE}, or delete it"
_TOP = {
    "schema",
    "version",
    "device",
    "environment",
    "policy",
    "subjects",
    "layers",
    "cells",
    "choices",
    "prices",
}
_SUBJECT = {"backend", "distribution", "version", "versions"}
_LAYER = {"spec", "count", "workload"}
_SHAPE = {"phase", "batch", "query", "context", "ragged", "decodes", "decode_context"}
_FIGURES = {"us", "build_us", "spread"}
_ROW = {"layer", "subject", "block_size", "layout", "status", "rounds", "date", "why"} | _SHAPE | _FIGURES
_CHOICE = {"layer", "phase", "backend", "default", "ratio", "why"}
_PRICES = {"layer", "subject", "error", "steps", "date"} | {
    field.name for field in dataclasses.fields(SharingPrices)
}


def read_table(path: Path, remedy: str = _REMEDY) -> TunedTable:
    """The table in a file; its errors advise `remedy`.

    Raises:
        MatrixFileError: the file is missing or cannot be read, or a part of it is not as `attnplug tune` writes it.
    """
    try:
        data = read_document(path, SCHEMA, VERSION, remedy)
    except FileNotFoundError as problem:
        raise unreadable(path, problem, remedy) from None
    try:
        table = _table(data, path)
    except _MALFORMED as problem:
        raise MatrixFileError(path, f"cannot be made sense of: {json_problem(problem)}", remedy) from None
    _ = table.times  # computed here, so that the first selection of each layer finds them
    return table


def update_table(path: Path, change: Callable[[TunedTable | None], TunedTable]) -> TunedTable:
    """Write what `change` makes of the table in a file, or of None without a file; several processes may write at once.

    Raises:
        MatrixFileError: the file is damaged or cannot be written.
    """
    with locked(path, _OTHER_FILE):
        # Read under the lock, because another process may have written in between.
        made = change(_current(path))
        try:
            files.write_text(path, table_text(made))
        except OSError as problem:
            raise unwritable(path, problem, _OTHER_FILE) from None
    return made


def table_to_update(path: Path, device: Device) -> TunedTable | None:
    """The table in a file that `update_table` will change; None without a file.

    Raises:
        MatrixFileError: no table of `device` can be written there. Said before minutes are spent on its times.
    """
    # Before the lock, which makes a file beside it.
    table = _current(path)
    if table is not None and not table.is_for(device):
        theirs, ours = (str(each.name or each) for each in (table.device, device))
        raise MatrixFileError(path, f"has times of {theirs}, not of {ours}", _OTHER_FILE)
    with locked(path, _OTHER_FILE):
        return table


def _current(path: Path) -> TunedTable | None:
    return read_table(path, remedy_for(path, _INSTEAD, _OTHER_FILE)) if files.may_exist(path) else None


def table_text(table: TunedTable) -> str:
    """The text of a table's file, with a line for each cell."""
    data = table.to_dict()
    lists = ("subjects", "layers", "cells", "choices", *(["prices"] if "prices" in data else []))
    head = ",\n".join(
        f" {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in data.items() if k not in lists
    )
    parts = []
    for name in lists:
        lines = ",\n".join(f"  {json.dumps(each, ensure_ascii=False)}" for each in data[name])
        parts.append(f' "{name}": [' + (f"\n{lines}\n ]" if lines else "]"))
    return whole_json("{\n" + head.lstrip() + ",\n" + ",\n".join(parts) + "\n}\n")


def _table(data: Mapping[str, Any], path: Path) -> TunedTable:
    # Older files have no prices.
    _only({"prices": [], **data}, _TOP, "the table")
    device = Device.from_dict(typed(data, "device", dict))
    environment = typed(data, "environment", dict)
    if not all(type(value) is str for value in environment.values()):
        raise TypeError("environment must map names to text")
    subjects = [_subject(each, device) for each in typed(data, "subjects", list)]
    layers = [_layer(each) for each in typed(data, "layers", list)]
    if len({layer_key(layer.spec) for layer in layers}) < len(layers):
        raise ValueError("two layers are alike")
    rows: list[dict[Any, TimedRow]] = [{} for _ in layers]
    for cell in typed(data, "cells", list):
        index, row = _index(cell, "layer", len(layers)), _row(cell, subjects)
        place = (row.subject.backend, row.subject.distribution, row.shape, row.pages)
        if rows[index].setdefault(place, row) is not row:
            raise ValueError(f"two cells are of {row.subject.backend} at {row.shape}")
    prices: list[dict[str, MeasuredPrices]] = [{} for _ in layers]
    for each in typed({"prices": [], **data}, "prices", list):
        index, price = _index(each, "layer", len(layers)), _prices(each, subjects)
        if prices[index].setdefault(price.subject.backend, price) is not price:
            raise ValueError(f"two prices are of {price.subject.backend}")
    choices = typed(data, "choices", list)
    for choice in choices:
        _only(choice, _CHOICE, "a choice")
        _index(choice, "layer", len(layers))
        _figure(choice, "ratio", _MOST_US)
        typed(choice, "phase", str, None)
        for name in ("backend", "default", "why"):
            typed(choice, name, str)
    return TunedTable(
        device,
        tuple(
            TunedLayer(spec.spec, spec.count, spec.workload, tuple(own.values()), tuple(priced.values()))
            for spec, own, priced in zip(layers, rows, prices, strict=True)
        ),
        environment,
        typed(data, "policy", dict),
        tuple(choices),
        path,
    )


def _subject(data: Mapping[str, Any], device: Device) -> BackendVersions:
    _only(data, _SUBJECT, "a subject")
    versions = typed(data, "versions", dict)
    if not all(type(value) is str for value in versions.values()):
        raise TypeError("versions must map distributions to text")
    backend = typed(data, "backend", str)
    if backend.count(COMPOSITE_SEPARATOR) > 1:
        raise ValueError(f"{backend!r:.60} is no backend: a composite has two halves")
    return BackendVersions(
        backend,
        typed(data, "distribution", str, None),
        typed(data, "version", str, None),
        device,
        tuple(sorted(versions.items())),
    )


def _layer(data: Mapping[str, Any]) -> TunedLayer:
    _only(data, _LAYER, "a layer")
    spec = LayerSpec.from_dict(typed(data, "spec", dict))
    count = typed(data, "count", int)
    if not 1 <= count <= _MOST_LAYERS:
        raise ValueError(f"count must be from 1 to {_MOST_LAYERS}, not {count}")
    workload = []
    for each in typed(data, "workload", list):
        _only(each, {*_SHAPE, "weight"}, "a shape")
        workload.append((StepShape.from_dict(each), _figure(each, "weight", _MOST_WEIGHT, _LEAST_WEIGHT)))
    if len({shape for shape, _ in workload}) < len(workload):
        raise ValueError("a workload has a shape twice")
    return TunedLayer(spec, count, tuple(workload), ())


def _row(data: Mapping[str, Any], subjects: list[BackendVersions]) -> TimedRow:
    _only(data, _ROW, "a cell")
    size, layout = typed(data, "block_size", int, None), typed(data, "layout", str, None)
    if (size is None) is not (layout is None) or layout not in (None, "NHD", "HND") or (size or 1) < 1:
        raise ValueError(f"pages of {size} tokens in {layout!r:.20} are none")
    pages: Pages = None if size is None or layout is None else (size, layout)
    status, rounds, date = RowStatus(typed(data, "status", str)), typed(data, "rounds", int), data["date"]
    dt.datetime.fromisoformat(date)
    row = TimedRow(
        subjects[_index(data, "subject", len(subjects))],
        StepShape.from_dict(data),
        pages,
        status,
        us=_figure(data, "us", _MOST_US),
        build_us=_figure(data, "build_us", _MOST_US),
        spread=_figure(data, "spread", _MOST_US),
        rounds=rounds,
        date=date,
        why=typed(data, "why", str),
    )
    if status is RowStatus.MEASURED and (row.us < _LEAST_US or rounds < 1):
        raise ValueError(f"a measured cell of {row.subject.backend} has no time")
    return row


def _prices(data: Mapping[str, Any], subjects: list[BackendVersions]) -> MeasuredPrices:
    _only(data, _PRICES, "a price")
    steps, date = typed(data, "steps", int), typed(data, "date", str)
    dt.datetime.fromisoformat(date)
    if steps < 1:
        raise ValueError(f"prices of {steps} steps")
    subject = subjects[_index(data, "subject", len(subjects))]
    return MeasuredPrices(
        subject, SharingPrices.from_dict(data), _figure(data, "error", _MOST_US), steps, date
    )


def _only(data: Any, names: set[str], what: str) -> None:
    """TypeError, KeyError or ValueError unless `data` is an object with exactly these fields."""
    # A misspelt field would be ignored.
    if type(data) is not dict:
        raise TypeError(f"{what} must be an object")
    if missing := names - data.keys():
        raise KeyError(min(missing))
    if unknown := data.keys() - names:
        raise ValueError(f"{what} has the unknown field {min(unknown)!r:.60}")


def _index(data: Mapping[str, Any], name: str, count: int) -> int:
    value: int = typed(data, name, int)
    if not 0 <= value < count:
        raise ValueError(f"{name} must be below {count}, not {value}")
    return value


def _figure(data: Mapping[str, Any], name: str, most: float, least: float = 0.0) -> float:
    value = float(typed(data, name, int, float))
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"{name} must be from {least:g} to {most:g}, not {value}")
    return value
