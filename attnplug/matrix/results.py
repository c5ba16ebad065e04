"""JSON files of the matrix: a schema with a version, one line for each cell, strict reading, atomic writing."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from attnplug._system import files, json_files
from attnplug._system.json_files import parse_json
from attnplug.core.compiled import CompiledKernel
from attnplug.core.errors import MatrixFileError
from attnplug.matrix.axes import Extent
from attnplug.matrix.model import Cell, Finding, Matrix, Run, Status
from attnplug.matrix.words import AXIS_NAMES

SCHEMA = "attnplug.matrix"
VERSION = 1

_MOST_BYTES = 1 << 29
_AGAIN = "make it again with attnplug matrix --json"
_PHASES = ("prefill", "decode", "mixed")

_OF_CELLS = [status for status in Status if status is not Status.SAMPLED]
"""The statuses of single cells."""

_Rule = tuple[Callable[[Any], bool], str]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_count(value: Any) -> bool:
    # bool is a subclass of int, but True cannot be a size.
    return type(value) is int and value > 0


def _is_axes(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and value.keys() == AXIS_NAMES.keys()
        and all(isinstance(values, list) for values in value.values())
        and all(
            each is None or _is_text(each) or _is_count(each) for values in value.values() for each in values
        )
    )


def _is_prefixes(value: Any) -> bool:
    return isinstance(value, dict) and all(each is None or _is_text(each) for each in value.values())


def _is_date(value: Any) -> bool:
    try:
        # Dates of several machines are compared, which needs the offset.
        return dt.datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


_TEXT: _Rule = (_is_text, "text")
_TEXT_OR_NULL: _Rule = (lambda value: value is None or _is_text(value), "text or null")
_COUNT: _Rule = (_is_count, "a whole number above 0")
_SIZE: _Rule = (lambda value: type(value) is int and value >= 0, "a whole number")
_RUN: dict[str, _Rule] = {
    "backend": _TEXT,
    "distribution": _TEXT_OR_NULL,
    "version": _TEXT_OR_NULL,
    "device": _TEXT,
    "device_name": _TEXT_OR_NULL,
    "versions": (
        lambda value: isinstance(value, dict) and all(map(_is_text, [*value, *value.values()])),
        "an object of text",
    ),
    "date": (_is_date, "a date and time with its offset, as 2026-11-21T18:00:00+00:00"),
    "commit": _TEXT_OR_NULL,
    "cells": (lambda value: isinstance(value, list), "a list"),
}
# Older files lack these fields, so their runs are samples. `sampled` is for other readers, and follows from the rest.
_MORE_OF_RUN: dict[str, _Rule] = {
    "axes": (_is_axes, "null, or an object with a list of values for each axis"),
    "sampled": (lambda value: value is None or isinstance(value, dict), "an object or null"),
    "kernels": (lambda value: isinstance(value, list), "a list"),
    "prefixes": (_is_prefixes, "an object with text or null for each feature"),
}
_KERNEL: dict[str, _Rule] = {
    "key": _TEXT,
    "kernel": _TEXT,
    **dict.fromkeys(("threads", "registers", "shared", "spilled"), _SIZE),
    "refused": (lambda value: isinstance(value, str), "text"),
}
_CELL: dict[str, _Rule] = {
    "feature": _TEXT,
    "phase": (lambda value: value in _PHASES, f"one of {', '.join(_PHASES)}"),
    "head_size": _COUNT,
    "dtype": _TEXT,
    "kv_cache_dtype": _TEXT,
    "block_size": (lambda value: value is None or _is_count(value), "a whole number above 0, or null"),
    "layout": _TEXT_OR_NULL,
    # A list, because a look-up of a list or an object in a set raises TypeError.
    "status": (lambda value: value in _OF_CELLS, f"one of {', '.join(_OF_CELLS)}"),
    "why": (lambda value: isinstance(value, list) and all(map(_is_text, value)), "a list of text"),
}


def run_to_dict(run: Run) -> dict[str, Any]:
    """The JSON object of a run, an entry of a file's `runs`.

    Raises:
        ValueError: the run has other sources, which a file would lose.
    """
    if run.sources:
        raise ValueError(
            f"{run.backend} on {run.device} has the cells of several cards or versions; write each run to a file of its own"
        )
    about = {name: getattr(run, name) for name in _RUN if name != "cells"}
    cells = [
        {**dataclasses.asdict(each.cell), "status": str(each.status), "why": list(each.why)}
        for each in run.findings
    ]
    more: dict[str, Any] = {}
    if run.axes is not None:
        more = {"axes": {axis: list(run.axes[axis]) for axis in AXIS_NAMES}, "sampled": _write_samples(run)}
    if run.kernels:
        more["kernels"] = list(map(dataclasses.asdict, run.kernels))
    if run.prefixes:
        more["prefixes"] = dict(run.prefixes)
    return {**about, "versions": dict(run.versions), **more, "cells": cells}


def _write_samples(run: Run) -> dict[str, Any] | None:
    """The part of all combinations of served values that was run; None if nothing was, or all of them.

    `of` is their number; `lacking` names an axis with values that were not run.
    """
    ran = sum(each.status in (Status.VERIFIED, Status.REFUTED) for each in run.findings)
    extent = Extent(run)
    if not ran or extent.is_whole(run.findings):
        return None
    return {"cells": ran, "of": extent.combinations(), "lacking": extent.lacking(run.findings) or None}


def matrix_text(matrix: Matrix) -> str:
    """The JSON of the matrix, a line for each cell: the file is small, and `git diff` readable."""
    runs = []
    for run in map(run_to_dict, matrix.runs):
        lists = {name: run.pop(name) for name in ("kernels", "cells") if name in run}
        about = ",\n".join(f"{_line(name)}: {_line(value)}" for name, value in run.items())
        parts = [about, *(f"{_line(name)}: {_lines(rows)}" for name, rows in lists.items())]
        runs.append("{" + ",\n".join(parts) + "}")
    head = f'{{\n"schema": {_line(SCHEMA)},\n"version": {VERSION},\n"runs": ['
    return head + ("\n" + ",\n".join(runs) + "\n" if runs else "") + "]\n}\n"


def _lines(rows: Sequence[Any]) -> str:
    """A list with a line for each entry."""
    joined = ",\n".join(map(_line, rows))
    return f"[\n{joined}\n]" if rows else "[]"


def write_matrix(matrix: Matrix, path: Path) -> None:
    """Write `matrix_text` as `write_file` does."""
    write_file(path, matrix_text(matrix))


def write_file(path: Path, text: str) -> None:
    """Write a file atomically. MatrixFileError: the file cannot be written; an older one is unchanged."""
    try:
        files.write_text(path, text)
    except OSError as problem:
        raise MatrixFileError(path, f"cannot be written: {files.why(problem)}") from None


def read_matrix(path: Path) -> Matrix:
    """The matrix that `write_matrix` wrote to `path`.

    Raises:
        MatrixFileError: the file is missing, half written, of an unknown schema or version, or has an invalid
            value; the error names its place.
    """
    try:
        data = parse_json(files.read_text(path, _MOST_BYTES))
    except OSError as problem:
        raise MatrixFileError(path, f"cannot be read: {files.why(problem)}") from None
    except UnicodeDecodeError:
        raise MatrixFileError(path, "is not UTF-8 text", _AGAIN) from None
    except json.JSONDecodeError as problem:
        what = f"is half written, or no JSON: {problem.msg} in line {problem.lineno}"
        raise MatrixFileError(path, what, _AGAIN) from None
    except ValueError as problem:
        raise MatrixFileError(path, f"cannot be read: {problem}", _AGAIN) from None
    return _Reader(path).matrix(data)


class _Reader:
    """Turns JSON values into the matrix; `path` is for errors."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def matrix(self, data: Any) -> Matrix:
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            found = data.get("schema") if isinstance(data, dict) else data
            self._refuse(f"has the schema {found!r:.60}, not {SCHEMA!r}", _AGAIN)
        # True and 1.0 equal 1, so the type is checked too.
        if data.get("version") != VERSION or type(data["version"]) is not int:
            remedy = f"read it with the attnplug that wrote it, or {_AGAIN}"
            self._refuse(f"is version {data.get('version')!r:.60} of {SCHEMA}; this reads {VERSION}", remedy)
        if not isinstance(data.get("runs"), list):
            self._refuse("has no list of runs", _AGAIN)
        runs = tuple(self._run(run, f"runs[{index}]") for index, run in enumerate(data["runs"]))
        for (backend, device), count in Counter(run.key for run in runs).items():
            if count > 1:
                remedy = "put each into a file of its own, and join them with attnplug matrix merge"
                self._refuse(f"has two runs of {backend} on {device}", remedy)
        return Matrix(runs)

    def _run(self, data: Any, place: str) -> Run:
        self._check(data, _RUN, place, _MORE_OF_RUN)
        cells = enumerate(data["cells"])
        findings = tuple(self._finding(each, f"{place}.cells[{index}]") for index, each in cells)
        # Two findings of one cell may contradict each other, and none of them is the right one.
        for cell, count in Counter(finding.cell.id for finding in findings).items():
            if count > 1:
                self._refuse(f"has two cells {cell} in {place}", _AGAIN)
        about = {name: data[name] for name in _RUN if name != "cells"}
        axes = data.get("axes")
        known = None if axes is None else {axis: tuple(axes[axis]) for axis in AXIS_NAMES}
        made = tuple(
            self._kernel(each, f"{place}.kernels[{index}]")
            for index, each in enumerate(data.get("kernels", ()))
        )
        prefixes = dict(data.get("prefixes", {}))
        return Run(**about, findings=findings, axes=known, kernels=made, prefixes=prefixes)

    def _kernel(self, data: Any, place: str) -> CompiledKernel:
        self._check(data, _KERNEL, place)
        return CompiledKernel(**data)

    def _finding(self, data: Any, place: str) -> Finding:
        self._check(data, _CELL, place)
        cell = Cell(**{field.name: data[field.name] for field in dataclasses.fields(Cell)})
        # A layer without pages has neither of the two.
        if (cell.block_size is None) is not (cell.layout is None):
            self._refuse(f"has in {place} one of block_size and layout without the other", _AGAIN)
        return Finding(cell, Status(data["status"]), tuple(data["why"]))

    def _check(
        self, data: Any, rules: Mapping[str, _Rule], place: str, more: Mapping[str, _Rule] | None = None
    ) -> None:
        """Refuse `data` unless it has the fields of `rules`, and of `more` any, with the values that they allow."""
        if not isinstance(data, dict):
            self._refuse(f"has {data!r:.60} for {place}, not an object", _AGAIN)
        # Unknown names are refused because a newer schema has another version.
        rules = {**rules, **{name: rule for name, rule in (more or {}).items() if name in data}}
        if data.keys() != rules.keys():
            missing, others = sorted(rules.keys() - data.keys()), sorted(data.keys() - rules.keys())
            what = f"lacks {', '.join(missing)}" if missing else f"has the unknown {others[0]!r:.60}"
            self._refuse(f"{what} in {place}", _AGAIN)
        for name, (is_right, what) in rules.items():
            if not is_right(data[name]):
                self._refuse(f"has {data[name]!r:.60} for {place}.{name}, which must be {what}", _AGAIN)

    def _refuse(self, what: str, remedy: str) -> NoReturn:
        raise MatrixFileError(self._path, what, remedy)


def _line(value: Any) -> str:
    return json_files.whole_json(json.dumps(value, ensure_ascii=False))
