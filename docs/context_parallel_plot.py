"""The plot and the tables of context parallelism, from measured results; docs/hooks/measured.py puts them into the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

RESULTS = Path(__file__).parents[1] / "benchmarks/results/context-parallel-h200x2.json"
MARKER = "<!-- measured: context parallelism -->"

COLOURS = {
    "light": {
        "text": "#1f2430",
        "faint": "#626978",
        "grid": "#d9dce3",
        "measured": "#3f51b5",
        "model": "#c2570c",
    },
    "dark": {
        "text": "#e6e8ee",
        "faint": "#a3a9b8",
        "grid": "#454b5a",
        "measured": "#9fa8ff",
        "model": "#ffab6b",
    },
}
WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM, STEP = 560, 18, 34, 38, 84, 60, 0.25


def svg(report: dict[str, Any], theme: str) -> str:
    """The plot: a line for each timed cell, from the time of one GPU (1x) to that of the ranks."""
    colour, cells = COLOURS[theme], timed(report)
    ratios = [ratio for cell in cells for ratio in (cell["ratio"], cell.get("model_ratio", 1))]
    low, high = min(0.75, *ratios) // STEP * STEP, -(-max(1.25, *ratios) // STEP) * STEP
    bottom = TOP + ROW * len(cells)
    height = bottom + BOTTOM

    def across(ratio: float) -> float:
        return round(LEFT + (ratio - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    def text(x: float, y: float, words: str, of: str = "text", size: int = 13, anchor: str = "start") -> str:
        place = f'x="{x}" y="{y}" fill="{colour[of]}" font-size="{size}" text-anchor="{anchor}"'
        return f"<text {place}>{escape(words)}</text>"

    title = f"{report['ranks']} GPUs that share the tokens of each request"
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" font-family="system-ui, sans-serif" '
            f'aria-label="{escape(title)}: speed against one GPU">'
        ),
        text(LEFT, 22, title, size=17),
        f'<circle cx="{LEFT + 6}" cy="44" r="5" fill="{colour["measured"]}"/>',
        text(LEFT + 18, 48, "measured"),
        f'<circle cx="{LEFT + 106}" cy="44" r="5" fill="none" stroke="{colour["model"]}" stroke-width="2"/>',
        text(LEFT + 118, 48, "model of the plan"),
    ]
    tick = low
    while tick <= high + 1e-9:
        at, strong = across(tick), abs(tick - 1) < 1e-9
        # A line of the grid is broken where labels are.
        path = "".join(f"M{at} {TOP + ROW * number + 18}v16" for number in range(len(cells)))
        stroke = colour["faint" if strong else "grid"]
        parts.append(f'<path d="{path}" stroke="{stroke}" stroke-width="{2 if strong else 1}"/>')
        parts.append(text(at, bottom + 18, f"{tick:g}x", "text" if strong else "faint", 12, "middle"))
        tick += STEP
    for number, cell in enumerate(cells):
        at, end = TOP + ROW * number + 26, across(cell["ratio"])
        parts.append(text(LEFT, at - 13, cell["name"]))
        parts.append(f'<path d="M{across(1)} {at}H{end}" stroke="{colour["measured"]}" stroke-width="2"/>')
        if "model_ratio" in cell:
            ring = f'cx="{across(cell["model_ratio"])}" cy="{at}" r="5" fill="none"'
            parts.append(f'<circle {ring} stroke="{colour["model"]}" stroke-width="2"/>')
        words = f"{cell['name']}: {cell['ratio']:.2f}x one GPU"
        mark = f'cx="{end}" cy="{at}" r="5" fill="{colour["measured"]}"'
        parts.append(f"<circle {mark}><title>{escape(words)}</title></circle>")
    parts += [
        text(LEFT, bottom + 38, "speed relative to one GPU (1x is equal)", "text", 12),
        text(
            LEFT,
            bottom + 54,
            f"{report['device']}, torch {report['torch']}, {report['date'][:10]}",
            "faint",
            12,
        ),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def timed(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells with times."""
    return [cell for cell in measured(report, "cells") if "ratio" in cell]


def measured(report: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """The rows of a part that ran to their end."""
    return [row for row in report.get(part, []) if "failed" not in row]


def tables(report: dict[str, Any]) -> str:
    """The figures: cells, exchanges, outputs and capacity."""
    ranks = report["ranks"]
    lines = [
        f"| step | one GPU, us a layer | {ranks} GPUs | ratio | model |",
        "|---|---:|---:|---:|---:|",
    ]
    for cell in timed(report):
        model = f"{cell['model_ratio']:.2f}x" if "model_ratio" in cell else ""
        times = f"{cell['one_us']:,.0f} | {cell['ranks_us']:,.0f}"
        lines.append(f"| {cell['name']} | {times} | {cell['ratio']:.2f}x | {model} |")
    lines += ["", "| exchange and merge of 64 x 32 x 128 | us | NCCL alone, us |", "|---|---:|---:|"]
    for each in measured(report, "exchange"):
        lines.append(f"| `{each['name']}` | {each['us']:.1f} | {each['nccl_us']:.1f} |")
    for each in measured(report, "capacity"):
        lines += [
            "",
            (
                f"In {each['name']}, {each['ranks_tokens']:,} tokens fit instead of {each['one_tokens']:,}: "
                f"{each['ratio']:.2f} x."
            ),
        ]
    errors = ", ".join(f"{each['name']} {each['error']:.1e}" for each in measured(report, "models"))
    lines += ["", f"The largest relative errors of the outputs against one GPU are: {errors}."]
    return "\n".join(lines)


def images(report: dict[str, Any]) -> dict[str, str]:
    """The plots by their file names."""
    return {f"context-parallel-{theme}.svg": svg(report, theme) for theme in COLOURS}


def section(report: dict[str, Any]) -> str:
    """The plots and the tables as Markdown, for a page in a folder of the docs."""
    shown = "\n".join(
        f"![Speed against one GPU, a mark for each step](../assets/{name}#only-{theme})"
        for name, theme in zip(images(report), COLOURS, strict=True)
    )
    return f"{shown}\n\n{tables(report)}"
