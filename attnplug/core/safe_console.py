"""A rich console whose text cannot control the terminal, and whose lines break no word."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from attnplug.core.text import safe_text
from attnplug.core.whole_words import Paragraph

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
