"""The plot and the tables of context parallelism, from measured results; docs/hooks/measured.py puts them into the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plots import THEMES, Words, marks

RESULTS = Path(__file__).parents[1] / "benchmarks/results/context-parallel-h200x2.json"
MARKER = "<!-- measured: context parallelism -->"


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
    """The plots by their file names: the speed of each timed step, measured and by the model of the plan."""
    title = f"{report['ranks']} GPUs that share the tokens of each request"
    note = f"{report['device']}, torch {report['torch']}, {report['date'][:10]}"
    words = Words(title, "speed relative to one GPU (1x is equal)", note)
    names = {"ratio": "measured", "model_ratio": "model of the plan"}
    drawn = [
        (cell["name"], {words: cell[name] for name, words in names.items() if name in cell})
        for cell in timed(report)
    ]
    return {f"context-parallel-{theme}.svg": marks(words, drawn, theme, base=1) for theme in THEMES}


def section(report: dict[str, Any]) -> str:
    """The plots and the tables as Markdown, for a page in a folder of the docs."""
    shown = "\n".join(
        f"![Speed against one GPU, a mark for each step](../assets/context-parallel-{theme}.svg#only-{theme})"
        for theme in THEMES
    )
    return f"{shown}\n\n{tables(report)}"
