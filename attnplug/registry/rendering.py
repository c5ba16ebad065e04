"""Rich renderables as plain text."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def as_text(renderable: RenderableType, width: int = 100) -> str:
    """The text that rich prints, without colour, markup or trailing spaces."""
    from rich.console import Console

    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None, markup=False, highlight=False)
    console.print(renderable)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
