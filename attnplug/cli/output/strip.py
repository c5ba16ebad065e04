"""The layers of a model as a strip: one cell for each layer, with the letter and the colour of its backend."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from attnplug.matrix.words import NO_BACKEND, letters

_COLOURS = (
    "green",
    "cyan",
    "magenta",
    "blue",
    "bright_green",
    "bright_cyan",
    "bright_magenta",
    "bright_blue",
)
_STYLES = {NO_BACKEND: "red", "TORCH": "yellow"}
_GROUP = 10
"""Cells between two blanks, so that a layer's number can be counted."""


class LayerStrip:
    """Rows of cells, wrapped at the width of the terminal, and a legend. Letters tell all without colour.

    Args:
        rows: the backend of each layer, "none" without one, in the order that the model runs them; by the
            name of the row, which is empty for a single one.
        known: the names of all backends, so that each has the same letter for every model.
    """

    def __init__(self, rows: Mapping[str, Sequence[str]], known: Iterable[str] = ()) -> None:
        self._rows = rows
        self._used = list(dict.fromkeys(itertools.chain.from_iterable(rows.values())))
        self._letters = letters((*known, *self._used))
        colours = dict(
            zip(sorted(set(self._letters) - _STYLES.keys()), itertools.cycle(_COLOURS), strict=False)
        )
        self._styles = {**colours, **_STYLES}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = max(map(len, self._rows.values()))
        titles = max(map(len, self._rows))
        margin = len(str(count - 1)) + 2 + (titles + 2 if titles else 0)
        # Each group of cells needs one more column for its blank.
        room = options.max_width - margin
        a_line = (room + 1) // (_GROUP + 1) * _GROUP or max(room, 1)
        for start in range(0, count, a_line):
            for title, names in self._rows.items():
                before = f"{title:{titles}}  " if titles else ""
                yield self._line(f"{before}{start:{len(str(count - 1))}}  ", names[start : start + a_line])
        yield self._legend()

    def _line(self, before: str, names: Sequence[str]) -> Text:
        line = Text(before, no_wrap=True, overflow="ignore")
        for index, name in enumerate(names):
            line.append(" " if index and index % _GROUP == 0 else "")
            line.append(self._letters[name], self._styles[name])
        return line

    def _legend(self) -> Text:
        entries = [Text(f"{self._letters[name]} = {name}", self._styles[name]) for name in self._used]
        return Text(", ").join(entries)
