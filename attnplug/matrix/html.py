"""The matrix as one self-contained HTML page, with its data, styles and scripts."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from attnplug.matrix.model import CLAIMED, Cell, Matrix, Run, Status
from attnplug.matrix.summary import STRONGEST_FIRST, RunSummary, ValueSummary, summarise
from attnplug.matrix.words import (
    AXIS_NAMES,
    MARKS,
    MEANINGS,
    Value,
    in_order,
    source_in_words,
    value_in_words,
)

_SCRIPTS = (
    *("data", "state", "elements", "keys", "unsampled", "filters"),
    *("overview", "cells", "detail", "config", "model", "pasted", "main"),
)
_STATUSES = tuple(MEANINGS)


def render_html(
    matrix: Matrix,
    *,
    title: str = "Compatibility matrix",
    models: Mapping[str, Any] | None = None,
    links: Mapping[str, str] | None = None,
) -> str:
    """The HTML document of a page that shows the matrix and filters it, for any recent browser.

    The page fetches nothing: its content security policy allows only its own scripts and styles, by hash.
    Names and reasons reach the document as text only.

    Args:
        matrix: to show; without runs the page shows the models alone.
        title: of the matrix.
        models: from `model_data`, for the view "Which backend for my model?"; None leaves it out.
        links: addresses by the text of the link, for the top of the page.
    """
    style = _part("matrix.css")
    script = "\n".join(_part(f"{name}.js") for name in _SCRIPTS)
    # It can neither end the script element nor open a comment in it.
    data = json.dumps({**page_data(matrix), "models": models}, separators=(",", ":"), ensure_ascii=False)
    for each in "<>&\u2028\u2029":
        data = data.replace(each, f"\\u{ord(each):04x}")
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}"
    values = {
        "policy": html.escape(f"{policy}; base-uri 'none'; form-action 'none'"),
        "title": html.escape(title),
        "style": style,
        "links": "".join(
            f'<a href="{html.escape(address)}">{html.escape(text)}</a>'
            for text, address in (links or {}).items()
        ),
        "data": data,
        "script": script,
    }
    # In one pass, so that inserted text is not searched for further "@@".
    pieces = _part("matrix.html").split("@@")
    return "".join(values[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def _part(name: str) -> str:
    return resources.files("attnplug.matrix").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def page_data(matrix: Matrix) -> dict[str, Any]:
    """The matrix as plain JSON values.

    `cells` has one number for each axis of each cell of any run. Each entry of a run's `findings` is three
    numbers: a cell, its status, and an index into `whys`, whose entries are indices into `reasons`. Each entry
    of a run's `limits` is five numbers: an axis and its value, another and its value, and an index into `whys`. Its
    `restrictions` have an axis, its value, another axis, and the words for the few values of it that are served.
    `whole` has an axis and its value, or -1 twice for all cells, where every combination was run; `lacking` the
    words for values that were not run. The `cells` of each of its `sources` are those whose finding is of that run.
    """
    values = {
        axis: in_order(axis, {getattr(finding.cell, axis) for run in matrix.runs for finding in run.findings})
        for axis in AXIS_NAMES
    }
    numbers = _CellNumbers(values)
    runs = [numbers.run(run) for run in matrix.runs]
    return {
        "axes": [
            {
                "field": axis,
                "name": name,
                "values": values[axis],
                "words": [value_in_words(axis, value) for value in values[axis]],
            }
            for axis, name in AXIS_NAMES.items()
        ],
        "statuses": [
            {"word": str(status), "mark": MARKS[status], "meaning": meaning, "claimed": status in CLAIMED}
            | {"ofCells": status is not Status.SAMPLED}
            for status, meaning in MEANINGS.items()
        ],
        "strongest": [_STATUSES.index(status) for status in STRONGEST_FIRST],
        "cells": [number for cell in numbers.cells for number in numbers.of_cell(cell)],
        "reasons": list(numbers.reasons),
        "whys": list(numbers.whys),
        "runs": runs,
    }


def _origin(run: Run) -> dict[str, Any]:
    return {
        "deviceName": run.device_name,
        "versions": dict(run.versions),
        "date": run.date,
        "commit": run.commit,
    }


class _CellNumbers:
    """Numbers cells, reasons and lists of reasons in order of first use."""

    def __init__(self, values: Mapping[str, Sequence[Value]]) -> None:
        self.cells: dict[Cell, int] = {}
        self.reasons: dict[str, int] = {}
        self.whys: dict[tuple[int, ...], int] = {}
        self._axes = tuple(values)
        self._values = [{value: number for number, value in enumerate(each)} for each in values.values()]

    def of_cell(self, cell: Cell) -> list[int]:
        numbered = zip(self._axes, self._values, strict=True)
        return [numbers[getattr(cell, axis)] for axis, numbers in numbered]

    def why(self, why: tuple[str, ...]) -> int:
        reasons = tuple(self.reasons.setdefault(reason, len(self.reasons)) for reason in why)
        return self.whys.setdefault(reasons, len(self.whys))

    def run(self, run: Run) -> dict[str, Any]:
        findings = [
            number
            for finding in run.findings
            for number in (
                self.cells.setdefault(finding.cell, len(self.cells)),
                _STATUSES.index(finding.status),
                self.why(finding.why),
            )
        ]
        summary = summarise(run)
        return {
            "backend": run.backend,
            "source": run.source,
            "plugin": run.plugin,
            "device": run.device,
            **_origin(run),
            "sources": [
                {
                    **_origin(source),
                    "words": source_in_words(run, source),
                    "cells": [self.cells[each.cell] for each in run.findings if each.source == number],
                }
                for number, source in enumerate(run.sources)
            ],
            "findings": findings,
            "limits": self._limits(summary),
            "restrictions": [
                [here, self._values[here][value], self._axes.index(few.axis), str(few)]
                for here, answers in enumerate(summary.answers.values())
                for value, answer in answers.items()
                if (few := answer.restriction)
            ],
            "whole": [place for *place, answer in self._answers(summary) if answer.status is Status.VERIFIED],
            "lacking": [
                [*place, answer.lacking] for *place, answer in self._answers(summary) if answer.lacking
            ],
        }

    def _answers(self, summary: RunSummary) -> Iterator[tuple[int, int, ValueSummary]]:
        yield -1, -1, summary.total
        for axis, answers in enumerate(summary.answers.values()):
            for value, answer in answers.items():
                yield axis, self._values[axis][value], answer

    def _limits(self, summary: RunSummary) -> list[int]:
        found = []
        for axis, answers in summary.answers.items():
            this = self._axes.index(axis)
            for value, answer in answers.items():
                for limit in answer.limits:
                    that = self._axes.index(limit.axis)
                    # Both values list the pair; the page needs it once.
                    if this < that:
                        found += [this, self._values[this][value], that, self._values[that][limit.value]]
                        found.append(self.why(limit.why))
        return found
