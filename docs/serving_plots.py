"""How near real batches come to the limits of the GPU, from measured results: `python docs/serving_plots.py` writes the tables."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plots import THEMES, Words, marks

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks/results/attention-serving-h200.json"
PAGE = DOCS / "performance/triton.md"
START, END = "<!-- what follows is written by docs/serving_plots.py -->", "<!-- end of what is written -->"

OURS, GIVEN = "TRITON", ", keys given"
CONTENDERS = ("TRITON", "FlashInfer", "FlashAttention 4")


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


def images() -> dict[str, str]:
    """The plots by their file names: a line for each cell with a mark for each contender; 100 % is the ceiling."""
    result = json.loads(RESULTS.read_text())
    found = {}
    for picture in PICTURES:
        drawn = [
            (row.name, {name: row.shares[name] for name in CONTENDERS if name in row.shares})
            for row in rows(result, picture)
        ]
        words = Words(
            picture.title,
            f"share of the ceiling, {picture.ceiling}",
            f"{result['device']}, {result['date'][:10]}",
        )
        if drawn:
            found |= {f"serving-{picture.name}-{theme}.svg": marks(words, drawn, theme) for theme in THEMES}
    return found


def table(found: list[Row]) -> str:
    """The figures of a plot, in us; of TRITON also the share of the ceiling."""
    others = [name for name in CONTENDERS if name != OURS and any(name in row.us for row in found)]
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


def dates(result: dict[str, Any]) -> str:
    """When and with which versions the figures were measured."""
    found = sorted({cell.get("date", result["date"])[:10] for cell in result["cells"]})
    words = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"Times in us: {result['device']}, {' and '.join(found)},\n{words}."


def filled(page: str) -> str:
    """The page with the plots and the figures of today's results."""
    result = json.loads(RESULTS.read_text())
    sections = [dates(result)]
    for picture in PICTURES:
        if not (found := rows(result, picture)):
            continue
        shown = "\n".join(
            f"![Share of the ceiling, a mark for each contender](../assets/serving-{picture.name}-{theme}.svg#only-{theme})"
            for theme in THEMES
        )
        sections.append(f"### {picture.title}\n\n{shown}\n\n{table(found)}")
    before, _, rest = page.partition(START)
    after = rest.partition(END)[2]
    return f"{before}{START}\n\n" + "\n\n".join(sections) + f"\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
