"""Tables and paragraphs for a terminal that break no word; a narrow one gets a block for each row.

A rich console whose text cannot control the terminal, and whose lines break no word.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.text import Text

from attnplug._system.text import safe_text

_GAP = 2
_NARROW = 70
"""Below this width a table is shown only if no cell needs a second line."""
_LIST, _PROSE = 10, 24
"""The least widths of a wrapped column: of words, or of sentences. A narrower one is hard to read."""
_SENTENCE = 40
"""A cell wider than this is a sentence."""
_WORD = re.compile(r"\s*\S+\s*")
_PART = re.compile(r"\s*(?:\S*[<>=]\S*|[^\s,-]+[,-]*|[,-]+)\s*")
"""A word, or the part of a name up to a hyphen or comma; a requirement is whole."""

_STYLES = {
    "chosen": "bold green",
    "ok": "green",
    "active": "green",
    "passed": "green",
    "loaded": "green",
    "refused": "red",
    "failed": "bold red",
    "broken": "red",
    "conflict": "red",
    "warning": "yellow",
    "lacking": "yellow",
    "inactive": "yellow",
    "none": "yellow",
    "accepted": "",
    "missing": "dim",
    "blocked": "dim",
}


def verdict(word: str) -> Text:
    """A verdict in its colour: green for chosen, red for refused or failed, yellow for a warning."""
    return Text(word, _STYLES.get(word, ""))


class Paragraph:
    """Text that is wrapped between words; a word wider than the terminal stays whole."""

    def __init__(self, text: str | Text, style: str = "") -> None:
        self._text = _text(text, style)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self._text.split("\n", allow_blank=True):
            yield from _unbroken(wrapped(line, options.max_width))


class WrappedTable:
    """A table without a frame. Lines have no trailing blanks.

    It wraps cells between words, and after hyphens and commas where a column has no room for a word. If the width does
    not suffice for that, or is below 70 columns, each row becomes a block: a heading, and a line for each other column.

    Args:
        columns: the headings; none is shown if all are empty.
        right: columns that align right.
        fixed: columns that never wrap.
        heading: the heading of a row's block, with columns in braces; by default the first column.
    """

    def __init__(
        self,
        columns: Sequence[str],
        right: Sequence[str] = (),
        fixed: Sequence[str] = (),
        heading: str | None = None,
    ) -> None:
        self._columns = [_text(column, "bold") for column in columns]
        names = [column.plain for column in self._columns]
        self._right = [name in right for name in names]
        self._fixed = [name in fixed for name in names]
        fields = ((name, before) for before, name, *_ in string.Formatter().parse(heading or ""))
        self._heading = [(names.index(name), before) for name, before in fields if name] or [(0, "")]
        self._rows: list[list[Text]] = []

    @property
    def row_count(self) -> int:
        """The number of rows, separators included."""
        return len(self._rows)

    def add_row(self, *cells: str | Text) -> None:
        """Add a row; without cells, an empty line."""
        self._rows.append([_text(cell) for cell in cells])

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widths = self._natural_widths()
        return Measurement(max(widths, default=0), sum(widths) + _GAP * (len(widths) - 1))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = self._widths(options.max_width)
        yield from _unbroken(self._blocks(options.max_width) if widths is None else self._lines(widths))

    def _natural_widths(self) -> list[int]:
        cells = zip(*(row for row in (self._columns, *self._rows) if row), strict=True)
        return [max(max(map(cell_len, cell.plain.split("\n"))) for cell in column) for column in cells]

    def _widths(self, total: int) -> list[int] | None:
        """The widths of the columns in a table of `total`; None if blocks are more readable."""
        natural = self._natural_widths()
        room = total - _GAP * (len(natural) - 1)
        if sum(natural) <= room:
            return natural
        if total < _NARROW:
            return None
        columns = list(zip(*(row for row in (self._columns, *self._rows) if row), strict=True))
        widths = list(natural)
        # The widest columns shrink first, because they have sentences. Names are broken only if that is too little.
        order = sorted(range(len(natural)), key=natural.__getitem__, reverse=True)
        for unit in (_WORD, _PART):
            for index in order:
                wide = natural[index]
                floor = _PROSE if wide > _SENTENCE and unit is _WORD else _LIST
                least = max(min(wide, floor), _longest(unit, columns[index]))
                if not self._fixed[index]:
                    widths[index] = max(least, widths[index] - max(0, sum(widths) - room))
            if sum(widths) <= room:
                return widths
        return None

    def _lines(self, widths: Sequence[int]) -> Iterator[Text]:
        has_header = any(column.plain for column in self._columns)
        for row in ([self._columns] if has_header else []) + self._rows:
            wrapped = [
                _cell(cell, width, _WORD if _longest_word(cell) <= width else _PART)
                for cell, width in zip(row, widths, strict=False)
            ]
            for index in range(max(map(len, wrapped), default=1)):
                line = Text()
                for column, lines in enumerate(wrapped):
                    part = lines[index] if index < len(lines) else Text()
                    blank = " " * (widths[column] - cell_len(part.plain))
                    line.append_text(Text(" " * _GAP if column else ""))
                    line = line + blank + part if self._right[column] else line + part + blank
                line.rstrip()
                yield line

    def _blocks(self, total: int) -> Iterator[Text]:
        headed = [index for index, _ in self._heading]
        others = [index for index in range(len(self._columns)) if index not in headed]
        if len(others) == 1 and not self._columns[others[0]].plain:
            # A table of names and values.
            rows = [(row[headed[0]], row[others[0]]) for row in self._rows if row]
            indent = max((cell_len(name.plain) + _GAP for name, _ in rows), default=0)
            for name, value in rows:
                yield from _entry(name, value, indent, total)
            return
        labels = [Text("  ") + Text(self._columns[index].plain, "dim") for index in others]
        is_plain = not any(label.plain.strip() for label in labels)
        indent = _GAP if is_plain else _GAP + max(cell_len(label.plain) for label in labels)
        if is_plain and len(headed) == 1 and self._columns[headed[0]].plain:
            yield self._columns[headed[0]].copy()
        for row in filter(None, self._rows):
            if any(row[index].plain for index in headed):
                title = Text(style="bold").join(Text(before) + row[index] for index, before in self._heading)
                yield from wrapped(title, total)
            cells = [row[index] for index in others]
            if is_plain:
                yield from _entry(Text(), Text("  ").join(filter(None, cells)), indent, total)
                continue
            for label, cell in zip(labels, cells, strict=True):
                yield from _entry(label, cell, indent, total) if cell.plain else ()


def _entry(label: Text, value: Text, indent: int, total: int) -> Iterator[Text]:
    """A label and its value: beside it, or below it if a word is too long for that."""
    if indent + _longest_word(value) > total:
        yield from [label.copy()] if label.plain.strip() else []
        yield from (Text("    ") + line for line in _cell(value, total - 4))
        return
    first, *rest = _cell(value, total - indent)
    yield label + Text(" " * (indent - cell_len(label.plain))) + first
    yield from (Text(" " * indent) + line for line in rest)


def _text(value: str | Text, style: str = "") -> Text:
    """A copy of `value` that cannot control the terminal. Tabs count as one blank."""
    if not isinstance(value, Text):
        return Text(safe_text(value).replace("\t", " "), style)
    plain = safe_text(value.plain).replace("\t", " ")
    return value.copy() if plain == value.plain else Text(plain, value.style)


def _longest_word(text: Text) -> int:
    return max(map(cell_len, text.plain.split()), default=0)


def _longest(unit: re.Pattern[str], column: Iterable[Text]) -> int:
    return max(cell_len(part.strip()) for cell in column for part in ("", *unit.findall(cell.plain)))


def _cell(text: Text, width: int, unit: re.Pattern[str] = _WORD) -> list[Text]:
    return [line for part in text.split("\n", allow_blank=True) for line in wrapped(part, width, unit)]


def wrapped(line: Text, width: int, unit: re.Pattern[str] = _WORD) -> list[Text]:
    """A line as lines of at most `width`, or of one longer word."""
    breaks, used = [], 0
    for word in unit.finditer(line.plain):
        if used and used + cell_len(word[0].rstrip()) > width:
            breaks.append(word.start())
            used = 0
        used += cell_len(word[0])
    parts = list(line.divide(breaks))
    for part in parts:
        part.rstrip()
    return parts


def _unbroken(lines: Iterable[Text]) -> Iterator[Text]:
    """The lines, which rich neither wraps nor crops."""
    for line in lines:
        line.no_wrap, line.overflow, line.end = True, "ignore", "\n"
        yield line


_UNKNOWN_WIDTH = 80


class SafeConsole(Console):
    """A rich Console that escapes what text could do to a terminal; colours and styles are rich's own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Terminals that do not know their size say COLUMNS=0, with which rich prints nothing.
        if self.width < 1:
            self.width = _UNKNOWN_WIDTH

    def print(self, *objects: Any, soft_wrap: bool | None = None, **settings: Any) -> None:
        """As rich, but each text is a paragraph, and a word that is wider than the terminal is not cut."""
        if not soft_wrap:
            settings.setdefault("crop", False)
            objects = tuple(Paragraph(each) if isinstance(each, str | Text) else each for each in objects)
        super().print(*objects, soft_wrap=soft_wrap, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """As rich; escaped before the text is measured, so that columns stay aligned."""
        return super().render_str(safe_text(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich, with the texts of renderable objects escaped too."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=safe_text(segment.text))
