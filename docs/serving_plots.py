"""Draws how near real batches come to the limits of the GPU, from measured results: `python docs/serving_plots.py`.

It writes `docs/assets/serving-NAME-light.svg` and `-dark.svg`, and the tables of `docs/performance/triton.md`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks/results/attention-serving-h200.json"
PAGE = DOCS / "performance/triton.md"
START, END = "<!-- what follows is written by docs/serving_plots.py -->", "<!-- end of what is written -->"

OURS, GIVEN = "TRITON", ", keys given"
MARKS = {"TRITON": "ours", "FlashInfer": "first", "FlashAttention 4": "second"}
"""Contenders, and the colours of their marks."""


@dataclass(frozen=True)
class Picture:
    """One plot: its name, its title, the kinds of its cells, and what their ceiling is."""

    name: str
    title: str
    kinds: tuple[str, ...]
    ceiling: str


PICTURES = (
    Picture("ragged", "Ragged and small decodes", ("ragged", "single"), "a device copy"),
    Picture("drafts", "Drafts and shared prefixes", ("speculative", "prefix"), "a device copy"),
    Picture("prefill", "Prompts and extends", ("prefill", "extend"), "a matrix product or a copy"),
)
COLOURS = {
    "light": {
        "text": "#1f2430", "faint": "#626978", "grid": "#d9dce3",
        "ours": "#3f51b5", "first": "#c2570c", "second": "#1b7f5c",
    },
    "dark": {
        "text": "#e6e8ee", "faint": "#a3a9b8", "grid": "#454b5a",
        "ours": "#9fa8ff", "first": "#ffab6b", "second": "#67d3a8",
    },
}  # fmt: skip
WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 560, 18, 34, 34, 74, 60


@dataclass(frozen=True)
class Row:
    """One cell: by contender its time in us, and the share of the ceiling that it reaches."""

    kind: str
    name: str
    us: dict[str, float]
    shares: dict[str, float]


def rows(result: dict[str, Any], picture: Picture) -> list[Row]:
    """The cells of a picture that TRITON was measured on, in the order of the benchmark."""
    return [
        Row(cell["kind"], cell["cell"], cell["us"], cell["of_ceiling"])
        for cell in result["cells"]
        if cell["kind"] in picture.kinds and OURS in cell["us"]
    ]


def svg(picture: Picture, found: list[Row], device: str, date: str, theme: str) -> str:
    """The plot: a line for each cell with a mark for each contender; 100 % is the ceiling."""
    colour, bottom = COLOURS[theme], TOP + ROW * len(found)
    high = max(1.0, *(share for row in found for share in row.shares.values()))
    high = -(-round(high, 6) // 0.2) * 0.2

    def across(share: float) -> float:
        return round(LEFT + share / high * (WIDTH - LEFT - RIGHT), 1)

    def text(x: float, y: float, words: str, of: str = "text", size: int = 12, anchor: str = "start") -> str:
        place = f'x="{x}" y="{y}" fill="{colour[of]}" font-size="{size}" text-anchor="{anchor}"'
        return f"<text {place}>{escape(words)}</text>"

    height = bottom + BOTTOM
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    words = f'aria-label="{escape(picture.title)}: share of the ceiling"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" font-family="system-ui, sans-serif" {words}>',
        text(LEFT, 22, picture.title, size=17),
    ]
    at = LEFT
    for name, of in MARKS.items():
        parts += [f'<circle cx="{at + 6}" cy="42" r="5" fill="{colour[of]}"/>', text(at + 18, 46, name)]
        at += 140
    tick = 0.0
    while tick <= high + 1e-9:
        x, strong = across(tick), abs(tick - 1) < 1e-9
        # A line of the grid is broken where labels are.
        path = "".join(f"M{x} {TOP + ROW * number + 16}v14" for number in range(len(found)))
        stroke = colour["faint" if strong else "grid"]
        parts.append(f'<path d="{path}" stroke="{stroke}" stroke-width="{2 if strong else 1}"/>')
        parts.append(text(x, bottom + 18, f"{tick:.0%}", "text" if strong else "faint", 12, "middle"))
        tick += 0.2
    for number, row in enumerate(found):
        top = TOP + ROW * number
        parts.append(text(LEFT, top + 12, row.name, size=13))
        # TRITON comes last, so that no other mark hides it.
        for name in reversed(MARKS):
            if name in row.shares:
                words = f"{name}: {row.us[name]:.1f} us, {row.shares[name]:.0%}"
                mark = f'cx="{across(row.shares[name])}" cy="{top + 23}" r="5" fill="{colour[MARKS[name]]}"'
                parts.append(f"<circle {mark}><title>{escape(words)}</title></circle>")
    parts += [
        text(LEFT, bottom + 38, f"share of the ceiling, {picture.ceiling}"),
        text(LEFT, bottom + 54, f"{device}, {date}", "faint"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def table(found: list[Row]) -> str:
    """The figures of a plot, in us; of TRITON also the share of the ceiling."""
    others = [name for name in MARKS if name != OURS and any(name in row.us for row in found)]
    cascades = any(f"{OURS}, no cascade" in row.us for row in found)
    given = any(OURS + GIVEN in row.us for row in found)
    more = [*(["no cascade"] if cascades else []), *(["keys given"] if given else [])]
    lines = [
        "| " + " | ".join(["cell", f"`{OURS}`", "of the ceiling", *more, *others]) + " |",
        "|---" + "|---:" * (2 + len(more) + len(others)) + "|",
    ]
    for row in found:
        names = [*(f"{OURS}, {each}" for each in more), *others]
        shown = [f"{row.us[name]:.1f}" if name in row.us else "-" for name in names]
        lines.append(
            f"| {row.name} | {row.us[OURS]:.1f} | {row.shares[OURS]:.0%} | "
            + " | ".join([*shown, ""]).rstrip()
        )
    return "\n".join(line if line.endswith("|") else line + " |" for line in lines)


def goals(result: dict[str, Any]) -> str:
    """The goals of the benchmark, with what was measured."""
    sys.path.insert(0, str(DOCS.parent / "benchmarks"))
    from serving import judge_serving

    lines = ["| goal | asked | found | |", "|---|---|---:|---|"]
    for goal in judge_serving(result["cells"], OURS):
        value = "" if goal["value"] is None else f"{goal['value']:.2f}"
        met = {None: "not measured", True: "met", False: "missed"}[goal["met"]]
        lines.append(f"| {goal['name'].removeprefix(f'{OURS}: ')} | {goal['goal']} | {value} | {met} |")
    return "\n".join(lines)


def dates(result: dict[str, Any]) -> str:
    """When and with which versions the figures were measured."""
    found = sorted({cell.get("date", result["date"])[:10] for cell in result["cells"]})
    words = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"Times in us: {result['device']}, {' and '.join(found)},\n{words}."


def files(page: str) -> dict[Path, str]:
    """The text of each file to write, by path."""
    result = json.loads(RESULTS.read_text())
    written, sections = {}, [dates(result), goals(result)]
    for picture in PICTURES:
        found = rows(result, picture)
        if not found:
            continue
        for theme in COLOURS:
            path = DOCS / "assets" / f"serving-{picture.name}-{theme}.svg"
            written[path] = svg(picture, found, result["device"], result["date"][:10], theme)
        images = "\n".join(
            f"![Share of the ceiling, a mark for each contender](../assets/serving-{picture.name}-{theme}.svg#only-{theme})"
            for theme in COLOURS
        )
        sections.append(f"#### {picture.title}\n\n{images}\n\n{table(found)}")
    before, _, rest = page.partition(START)
    after = rest.partition(END)[2]
    written[PAGE] = f"{before}{START}\n\n" + "\n\n".join(sections) + f"\n\n{END}{after}"
    return written


if __name__ == "__main__":
    for path, content in files(PAGE.read_text()).items():
        path.write_text(content)
