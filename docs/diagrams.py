"""Draws the diagrams of the documentation, light and dark: `python docs/diagrams.py`.

They are not in Mermaid: Material fetches its script from unpkg.com when a page is read, and this site fetches nothing.
A copy in the repository would be 3 MB of other people's code for two pictures. These are readable without scripts, on
a phone and in the README, and a test compares their words with the names of attnplug.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"

WIDTH = 440
"""So narrow that a phone shows text of readable size."""
LINE = 17


@dataclasses.dataclass(frozen=True)
class Theme:
    """The colours on a page of one theme: text, notes and arrows, and the grounds of boxes."""

    ink: str
    note: str
    accent: str
    plain: str
    strong: str


THEMES = {
    "light": Theme("#1f2328", "#59636e", "#3949ab", "#f2f4f8", "#e3e7fb"),
    "dark": Theme("#e6edf3", "#9ba5b0", "#9fa8da", "#2a2e3c", "#343a5e"),
}


@dataclasses.dataclass
class Canvas:
    """The elements of one diagram."""

    theme: Theme
    parts: list[str] = dataclasses.field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = 13,
        note: bool = False,
        bold: bool = False,
        anchor: str = "middle",
    ) -> None:
        """Words at `x`, their middle or their start, on the line `y`."""
        colour = self.theme.note if note else self.theme.ink
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        title: str,
        notes: Iterable[str] = (),
        *,
        strong: bool = False,
    ) -> None:
        """A box with a title and lines of notes in its middle."""
        lines = [*notes]
        ground = self.theme.strong if strong else self.theme.plain
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            f'fill="{ground}" stroke="{self.theme.accent}" stroke-opacity="0.6"/>'
        )
        top = y + (height - LINE * (len(lines) + 1)) / 2 + 13
        self.text(x + width / 2, top, title, bold=True)
        for number, line in enumerate(lines, 1):
            self.text(x + width / 2, top + number * LINE, line, size=12, note=True)

    def small(self, x: float, y: float, width: float, name: str) -> None:
        """A low box with a name alone."""
        ground, edge = self.theme.plain, self.theme.accent
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="40" rx="6" fill="{ground}" '
            f'stroke="{edge}" stroke-opacity="0.6"/>'
        )
        self.text(x + width / 2, y + 24, name, size=10)

    def arrow(self, x: float, y: float, x2: float, y2: float) -> None:
        """A straight arrow, down or to the right."""
        tip = (
            f"{x2 - 5:g},{y2 - 7:g} {x2 + 5:g},{y2 - 7:g}"
            if x == x2
            else f"{x2 - 7:g},{y2 - 5:g} {x2 - 7:g},{y2 + 5:g}"
        )
        colour = self.theme.accent
        self.parts.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="1.5"/>'
            f'<polygon points="{x2:g},{y2:g} {tip}" fill="{colour}"/>'
        )

    def svg(self, title: str, height: float) -> str:
        """The whole picture on a transparent ground."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img" '
            'font-family="system-ui, sans-serif">'
        )
        return "\n".join([head, f"<title>{escape(title)}</title>", *self.parts, "</svg>\n"])


GATES = {
    "plugin": ("Did it load?", "blocked, conflict, …"),
    "installed": ("Are its libraries here?", "not_installed, version"),
    "configuration": ("Does it serve this layer here?", "head_size, sink, …"),
    "evidence": ("Was it ever wrong here?", "refuted"),
}
"""The gates before the ranking in order, each with its question and codes of its reasons."""


def selection(theme: Theme) -> str:
    """From a layer to a decision."""
    canvas, middle, width, reasons = Canvas(theme), 120.0, 226.0, 272.0

    def gate(y: float, name: str, question: str, codes: str) -> None:
        canvas.arrow(middle, y - 22, middle, y)
        canvas.box(7, y, width, 46, f"Gate: {name}", [question])
        canvas.arrow(7 + width, y + 23, reasons - 6, y + 23)
        canvas.text(reasons, y + 27, codes, size=12, note=True, anchor="start")

    canvas.box(
        1, 1, WIDTH - 2, 46, "LayerSpec, device, phase", ["what a layer asks for, and where"], strong=True
    )
    canvas.arrow(middle, 47, middle, 70)
    canvas.box(7, 70, width, 46, "Candidates", ["the backends of all plugins"])
    canvas.text(reasons, 88, "Reasons", bold=True, anchor="start")
    canvas.text(reasons, 88 + LINE, "from each failed gate", size=12, note=True, anchor="start")
    y = 138.0
    for name, (question, codes) in GATES.items():
        gate(y, name, question, codes)
        y += 68
    canvas.arrow(middle, y - 22, middle, y)
    ranks = ["1. the backend that you asked for", "2. plugins that may rank", "3. priority"]
    canvas.box(7, y, width, 80, "Ranking", ranks)
    y += 102
    gate(y, "import", "First of the ranking that passes", "import_failed, …")
    canvas.arrow(middle, y + 46, middle, y + 70)
    canvas.arrow(reasons + 50, y + 40, reasons + 50, y + 70)
    notes = ["the chosen backend, its block size and KV layout,", "and each refused one with its reasons"]
    canvas.box(1, y + 70, WIDTH - 2, 64, "Decision", notes, strong=True)
    return canvas.svg("Selection: gates, ranking, import and decision", y + 135)


PLUGINS = {
    "TORCH": "torch",
    "TRITON": "triton",
    "FLASHINFER": "flashinfer",
    "FLASH_MLA": "flash-mla",
    "FLASH_ATTN": "flash-attn",
    "yours": "your kernels",
}
"""Backends, or families of them, and the library that each one runs."""


def architecture(theme: Theme) -> str:
    """Who calls whom."""
    canvas, half = Canvas(theme), (WIDTH - 10) / 2
    canvas.box(1, 1, half - 1, 46, "Engine", ["schedules, runs the model"])
    canvas.box(half + 10, 1, half - 1, 46, "transformers", ['attn_implementation="attnplug"'])
    for x in (half / 2, half * 1.5 + 10):
        canvas.arrow(x, 47, x, 92)
    canvas.text(WIDTH / 2, 66, "LayerSpec once,", size=12, note=True)
    canvas.text(WIDTH / 2, 82, "a batch each step", size=12, note=True)
    canvas.box(1, 92, WIDTH - 2, 156, "", strong=True)
    canvas.text(WIDTH / 2, 112, "attnplug", size=14, bold=True)
    parts = {
        "registry": "gates, ranking, reasons",
        "runtime": "KV caches, batches, steps",
        "core": "the contract of both sides",
        "testing": "oracle, conformance kit",
    }
    for number, (name, what) in enumerate(parts.items()):
        x, y = 12 + (number % 2) * 213, 122 + (number // 2) * 60
        canvas.box(x, y, 203, 52, name, [what])
    width = (WIDTH - 2 - (len(PLUGINS) - 1) * 6) / len(PLUGINS)
    canvas.text(WIDTH / 2, 270, "plugins: a small class declares, builder and impl run", size=12, note=True)
    canvas.text(WIDTH / 2, 368, "libraries: imported only after selection", size=12, note=True)
    for number, (backend, library) in enumerate(PLUGINS.items()):
        x = 1 + number * (width + 6)
        canvas.arrow(x + width / 2, 278, x + width / 2, 300)
        canvas.small(x, 300, width, backend)
        canvas.arrow(x + width / 2, 376, x + width / 2, 398)
        canvas.small(x, 398, width, library)
    return canvas.svg("Engines call attnplug, attnplug calls plugins, and plugins call kernel libraries", 440)


DIAGRAMS: dict[str, Callable[[Theme], str]] = {"selection": selection, "architecture": architecture}


def pictures() -> dict[Path, str]:
    """Each file with its content."""
    return {
        ASSETS / f"{name}-{theme}.svg": draw(colours)
        for name, draw in DIAGRAMS.items()
        for theme, colours in THEMES.items()
    }


if __name__ == "__main__":
    for path, content in pictures().items():
        path.write_text(content)
