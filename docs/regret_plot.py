"""The plot and the tables of regret, from measured results; docs/hooks/measured.py puts them into the page."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from plots import THEMES, Words, distributions

RESULTS = Path(__file__).parents[1] / "benchmarks/results/regret-h200.json"
ENGINE = RESULTS.with_name("tuned-engine-h200.json")
MARKER = "<!-- measured: regret -->"


def policies(report: dict[str, Any]) -> dict[str, list[float]]:
    """The regret of each policy in percent, in ascending order."""
    names = dict.fromkeys(name for cell in report["cells"] for name in cell["regret"])
    return {name: sorted(100 * cell["regret"][name] for cell in report["cells"]) for name in names}


def images(report: dict[str, Any]) -> dict[str, str]:
    """The plots by their file names: the share of steps up to each regret, a line for each policy."""
    title = f"How much slower than the best: {len(report['cells'])} steps"
    words = Words(title, "regret: time over that of the best backend of the step, minus 1", _device(report))
    return {f"regret-{theme}.svg": distributions(words, policies(report), theme) for theme in THEMES}


def _device(report: dict[str, Any]) -> str:
    return str(report["device"].get("name") or report["device"].get("type", ""))


def section(report: dict[str, Any]) -> str:
    """The plots and the tables as Markdown, for a page in a folder of the docs."""
    lines = [f"### Measured on {_device(report)}", ""]
    picture = "![Share of steps up to each regret, a line a policy](../assets/regret-{0}.svg#only-{0})"
    lines += [picture.format(theme) for theme in THEMES]
    lines += ["", f"| policy, {len(report['cells'])} steps | mean | p95 | worst |", "|---|---:|---:|---:|"]
    for name, values in policies(report).items():
        p95 = values[-(-95 * len(values) // 100) - 1]
        figures = " | ".join(f"{value:.1f} %" for value in (statistics.fmean(values), p95, values[-1]))
        lines.append(f"| {name} | {figures} |")
    if ENGINE.exists():
        lines += ["", *end_to_end(json.loads(ENGINE.read_text()))]
    return "\n".join(lines)


def end_to_end(report: dict[str, Any]) -> list[str]:
    """Tokens per second of engines with the table and without."""
    sizes = report["settings"]
    lines = [
        f"{sizes['requests']} requests with prompts of {sizes['prompt']:,} tokens, in an engine with few layers of each model:",
        "",
        "| model | engine | phase | tokens/s by priority | by the table | ratio |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in report["models"]:
        for phase, ratio in row.get("ratio", {}).items():
            rates = row[f"{phase}_tokens_s"]
            # Two runs of one engine: their ratio is noise of the host.
            gain = "same backends" if row.get("same_backends") else f"{ratio:.2f}x"
            figures = f"{rates['default']:,.0f} | {rates['tuned']:,.0f} | {gain}"
            lines.append(f"| {row['model']} | {row['engine']} | {phase} | {figures} |")
    if any(row.get("same_backends") for row in report["models"]):
        lines += [
            "",
            'With "same backends" both are one engine in two runs, whose times differ by other work of the host.',
        ]
    return lines
