"""The matrix in a terminal: the runs, tables of backends and features, the values served, and all evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from attnplug._system.terminal_tables import WrappedTable
from attnplug.matrix.model import Matrix, Status
from attnplug.matrix.summary import (
    BESIDE,
    RunSummary,
    ValueSummary,
    by_device,
    evidence_lines,
    prefix_rows,
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
    PLAIN_MARKS,
    Value,
    device_in_words,
    one_line,
    value_in_words,
)

_STYLES = {
    Status.VERIFIED: "green",
    Status.SAMPLED: "green",
    Status.COMPILED: "cyan",
    Status.DECLARED: "cyan",
    Status.REFUTED: "bold red",
    Status.UNCLAIMED: "magenta",
    Status.NOT_RUN: "yellow",
    Status.REFUSED: "dim",
}


def render_terminal(matrix: Matrix, console: Console) -> None:
    """Print the matrix, device by device, in as many tables as the width needs.

    Colour only repeats marks and words. The marks are ASCII if the console's encoding has no others.
    In a file, each piece of evidence is one line.
    """
    page = _Page(console)
    if not matrix.runs:
        page.line("No backend was asked.")
    for runs in by_device(matrix).values():
        page.device(device_in_words(runs), [summarise(run) for run in runs])
    page.legend()


class _Page:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown: set[Status] = set()
        self._limited = False
        self._marks = MARKS
        try:
            "".join(MARKS.values()).encode(console.encoding)
        except (LookupError, UnicodeEncodeError):
            self._marks = PLAIN_MARKS

    def line(self, text: str | Text = "", *, style: str = "") -> None:
        shown = text if isinstance(text, Text) else Text(one_line(text), style=style)
        self._console.print(shown, soft_wrap=not self._console.is_terminal)

    def device(self, name: str, summaries: Sequence[RunSummary]) -> None:
        self.line(name, style="bold")
        self.line()
        self._runs(summaries)
        served = serving(summaries)
        for beside in self._fitting(served):
            self._answers(beside)
        if served:
            self._values(served)
        self._evidence(evidence_lines(summaries, Status.REFUTED), "Refuted: claimed, and wrong when run")
        self._evidence(evidence_lines(summaries, Status.NOT_RUN), "Not run")
        self._evidence(spill_lines(summaries), "Spills")
        self._prefixes(summaries)

    def legend(self) -> None:
        for status, meaning in MEANINGS.items():
            if status in self._shown:
                self._console.print(Text.assemble(self._status(status), f": {meaning}"))
        if self._limited:
            self._console.print(
                "*: not with everything else that is served; --html and --json have each cell"
            )

    def _runs(self, summaries: Sequence[RunSummary]) -> None:
        table = WrappedTable(("backend", "from", "date", "cells"))
        self._shown.update(status for summary in summaries for status in summary.total.counts)
        for name, run, cells in sources(summaries):
            row = (name, run.source, run.date[:10] or "-", cells)
            table.add_row(*(Text(one_line(word)) for word in row))
        self._console.print(table)
        for line in refusal_lines(summaries):
            self.line(f"serves nothing there: {line}")
        self.line()

    def _answers(self, summaries: Sequence[RunSummary]) -> None:
        table = WrappedTable(("", *(one_line(summary.run.backend) for summary in summaries)))
        for axis in BESIDE:
            for value in values_of(summaries, axis):
                answers = [summary.answers[axis].get(value) for summary in summaries]
                table.add_row(one_line(value_in_words(axis, value)), *map(self._answer, answers))
            if axis != BESIDE[-1]:
                table.add_row()
        self._console.print(table)
        self.line()

    def _fitting(self, summaries: Sequence[RunSummary]) -> Iterator[list[RunSummary]]:
        """The backends in groups that fit into one table."""
        labels = [value_in_words(axis, value) for axis in BESIDE for value in values_of(summaries, axis)]
        beside: list[RunSummary] = []
        width = first = max(map(len, labels), default=0)
        for summary in summaries:
            answers = [answer for axis in BESIDE for answer in summary.answers[axis].values()]
            words = [len(one_line(summary.run.backend)), *(self._answer(each).cell_len for each in answers)]
            if beside and width + 2 + max(words) > self._console.width:
                yield beside
                beside, width = [], first
            beside.append(summary)
            width += 2 + max(words)
        if beside:
            yield beside

    def _values(self, summaries: Sequence[RunSummary]) -> None:
        listed = [axis for axis in AXIS_NAMES if axis not in BESIDE]
        if len(summaries) == 1:
            table = WrappedTable(("", "", ""))
            for axis in listed:
                self._list(table, f"{AXIS_NAMES[axis]}s", axis, summaries[0].answers[axis])
            self._console.print(table)
            self.line()
            return
        for axis in listed:
            table = WrappedTable((f"{AXIS_NAMES[axis]}s", "", ""))
            for summary in summaries:
                self._list(table, one_line(summary.run.backend), axis, summary.answers[axis])
            self._console.print(table)
            self.line()

    def _list(
        self, table: WrappedTable, label: str, axis: str, answers: Mapping[Value, ValueSummary]
    ) -> None:
        self._limited |= any(answer.limits for answer in answers.values())
        for status, words in values_by_status(axis, answers).items():
            table.add_row(Text(label), self._status(status), Text(words))
            label = ""

    def _prefixes(self, summaries: Sequence[RunSummary]) -> None:
        table, before = WrappedTable(("shared prefixes", "", "")), ""
        rows = prefix_rows(summaries)
        for backend, features, why in rows:
            table.add_row(one_line(backend) if backend != before else "", features, one_line(why))
            before = backend
        if rows:
            self._console.print(table)
            self.line()

    def _evidence(self, lines: Sequence[str], heading: str) -> None:
        if lines:
            self.line(heading, style="bold")
            for line in lines:
                self.line(line)
            self.line()

    def _answer(self, answer: ValueSummary | None) -> Text:
        if answer is None:
            return Text("not asked", style="dim")
        self._limited |= answer.is_starred
        star = "*" if answer.is_starred else ""
        share = f" {answer.ran}" if answer.ran else ""
        only = f", {answer.restriction}" if answer.restriction else ""
        where = f", {answer.elsewhere}" if answer.elsewhere else ""
        return self._status(answer.status).append(star + share + only + where)

    def _status(self, status: Status) -> Text:
        self._shown.add(status)
        return Text(f"{self._marks[status]} {status}", style=_STYLES[status])
