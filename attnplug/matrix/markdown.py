"""The matrix as Markdown: tables of backends and axis values for each device, and all evidence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from attnplug.matrix.model import Matrix, Run, Status
from attnplug.matrix.summary import (
    BESIDE,
    RunSummary,
    ValueSummary,
    by_device,
    evidence_lines,
    refusal_lines,
    serving,
    sources,
    spill_lines,
    summarise,
    values_by_status,
    values_of,
)
from attnplug.matrix.words import (
    AXIS_NAMES,
    MARKS,
    MEANINGS,
    backend_in_words,
    device_in_words,
    device_names,
    one_line,
    value_in_words,
)

_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<!\w)_|_(?!\w)|^[-+#]|(?<=^\d)[.)]")


def render_markdown(matrix: Matrix, *, level: int = 2) -> str:
    """The matrix as Markdown, for any renderer with tables; empty for a matrix without runs.

    `level` is that of the headings of devices. Names and reasons are escaped.
    """
    parts: list[str] = []
    shown: set[Status] = set()
    limited = False
    for runs in by_device(matrix).values():
        summaries = [summarise(run) for run in runs]
        parts.append(f"{'#' * level} {markdown_text(device_in_words(runs))}\n")
        parts.extend(_device(summaries, "#" * (level + 1)))
        shown.update(status for summary in summaries for status in summary.total.counts)
        answers = [answer for each in summaries for axis in each.answers.values() for answer in axis.values()]
        shown.update(answer.status for answer in answers)
        limited = limited or any(answer.limits for answer in answers)
    legend = [
        (f"{MARKS[status]} {status}", meaning) for status, meaning in MEANINGS.items() if status in shown
    ]
    if limited:
        legend.append(("\\*", "not with everything else that is served"))
    if legend:
        parts.append(_table(("", "meaning"), legend))
    return "\n".join(parts)


def markdown_text(text: str) -> str:
    """The text escaped for Markdown, as one line that may be in a table."""
    escaped = _SPECIAL.sub(lambda found: "\\" + found[0], one_line(text))
    return escaped.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def markdown_row(cells: Sequence[str]) -> str:
    """A line of a table. The cells must be Markdown already."""
    return f"| {' | '.join(cells)} |\n"


def _device(summaries: Sequence[RunSummary], heading: str) -> Iterator[str]:
    head = ("backend", "from", "ran with", "date", "cells")
    # The heading names the card if there is one.
    has_cards = len(device_names(summary.run for summary in summaries)) > 1
    rows = [
        (
            markdown_text(name),
            markdown_text(run.source),
            markdown_text(", ".join(_ran_with(run, has_cards)) or "nothing"),
            markdown_text(run.date[:10] or "-"),
            markdown_text(cells),
        )
        for name, run, cells in sources(summaries)
    ]
    yield _table(head, rows)
    served = serving(summaries)
    if served:
        names = [markdown_text(backend_in_words(summary.run)) for summary in served]
        yield _table(("", *names), _answer_rows(served))
        yield _table(("", *names), _value_rows(served))
    yield from _bullets(f"{heading} Serves nothing there", refusal_lines(summaries))
    yield from _bullets(f"{heading} Refuted", evidence_lines(summaries, Status.REFUTED))
    yield from _bullets(f"{heading} Not run", evidence_lines(summaries, Status.NOT_RUN))
    yield from _bullets(f"{heading} Spills", spill_lines(summaries))


def _ran_with(run: Run, has_cards: bool) -> list[str]:
    """The versions of a run, behind its card if `has_cards`."""
    card = [run.device_name] if has_cards and run.device_name else []
    return [*card, *(f"{name} {version}" for name, version in run.versions.items())]


def _answer_rows(summaries: Sequence[RunSummary]) -> list[tuple[str, ...]]:
    return [
        (
            markdown_text(value_in_words(axis, value)),
            *(_answer(summary.answers[axis].get(value)) for summary in summaries),
        )
        for axis in BESIDE
        for value in values_of(summaries, axis)
    ]


def _value_rows(summaries: Sequence[RunSummary]) -> list[tuple[str, ...]]:
    rows = []
    for axis, name in AXIS_NAMES.items():
        if axis in BESIDE:
            continue
        lists = [values_by_status(axis, summary.answers[axis]) for summary in summaries]
        cells = (
            "<br>".join(f"{MARKS[status]} {status}: {markdown_text(words)}" for status, words in each.items())
            for each in lists
        )
        rows.append((f"{name}s", *cells))
    return rows


def _bullets(heading: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"{heading}\n"
        yield "".join(f"- {markdown_text(line)}\n" for line in lines)


def _answer(answer: ValueSummary | None) -> str:
    if answer is None:
        return "not asked"
    star = "\\*" if answer.is_starred else ""
    share = f" {answer.ran}" if answer.ran else ""
    only = f", {markdown_text(str(answer.restriction))}" if answer.restriction else ""
    where = f", {markdown_text(answer.elsewhere)}" if answer.elsewhere else ""
    return f"{MARKS[answer.status]} {answer.status}{star}{share}{only}{where}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_row(head) + "|" + "---|" * len(head) + "\n" + "".join(map(markdown_row, rows))
