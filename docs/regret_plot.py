"""The plot and the tables of regret, from measured results; docs/hooks/measured.py puts them into the page."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

RESULTS = Path(__file__).parents[1] / "benchmarks/results/regret-h200.json"
ENGINE = RESULTS.with_name("tuned-engine-h200.json")
MARKER = "<!-- measured: regret -->"

COLOURS = {
    "light": {"text": "#1f2430", "faint": "#626978", "grid": "#d9dce3"},
    "dark": {"text": "#e6e8ee", "faint": "#a3a9b8", "grid": "#454b5a"},
}
LINES = {"light": ("#c2570c", "#3f51b5", "#2e7d32"), "dark": ("#ffab6b", "#9fa8ff", "#81c784")}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 360, 52, 18, 92, 62


def policies(report: dict[str, Any]) -> dict[str, list[float]]:
    """The regret of each policy in percent, in ascending order."""
    names = dict.fromkeys(name for cell in report["cells"] for name in cell["regret"])
    return {name: sorted(100 * cell["regret"][name] for cell in report["cells"]) for name in names}


def svg(report: dict[str, Any], theme: str) -> str:
    """The share of cells up to each regret: a line for each policy."""
    colour, found = COLOURS[theme], policies(report)
    worst = max(1.0, *(values[-1] for values in found.values()))
    step = next(s for s in (0.5, 1, 2, 5, 10, 20, 50, 100, 1000, 10_000) if worst / s <= 8)
    end = -(-worst // step) * step

    def across(regret: float) -> float:
        return round(LEFT + regret / end * (WIDTH - LEFT - RIGHT), 1)

    def down(share: float) -> float:
        return round(TOP + (1 - share) * (HEIGHT - TOP - BOTTOM), 1)

    def text(x: float, y: float, words: str, of: str = "text", size: int = 12, anchor: str = "start") -> str:
        place = f'x="{x}" y="{y}" fill="{colour[of]}" font-size="{size}" text-anchor="{anchor}"'
        return f"<text {place}>{escape(words)}</text>"

    title = f"How much slower than the best: {len(report['cells'])} steps"
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" font-family="system-ui, sans-serif" '
            f'aria-label="{escape(title)}">'
        ),
        text(LEFT, 22, title, size=17),
    ]
    for number, name in enumerate(found):
        y, line = 42 + 16 * number, LINES[theme][number % 3]
        parts.append(f'<path d="M{LEFT} {y}h14" stroke="{line}" stroke-width="2"/>')
        parts.append(text(LEFT + 20, y + 4, name))
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = down(share)
        parts.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="{colour["grid"]}"/>')
        parts.append(text(LEFT - 6, y + 4, f"{100 * share:g} %", "faint", 11, "end"))
    for number in range(round(end / step) + 1):
        words = f"{number * step:g} %"
        parts.append(text(across(number * step), HEIGHT - BOTTOM + 18, words, "faint", 11, "middle"))
    for number, (name, values) in enumerate(found.items()):
        path = f"M{across(0)} {down(0)}"
        for place, value in enumerate(values, 1):
            path += f"H{across(value)}V{down(place / len(values))}"
        stroke = f'fill="none" stroke="{LINES[theme][number % 3]}" stroke-width="2"'
        parts.append(f'<path d="{path}H{across(end)}" {stroke}><title>{escape(name)}</title></path>')
    device = report["device"].get("name") or report["device"].get("type", "")
    parts += [
        text(LEFT, HEIGHT - 22, "regret: time over that of the best backend of the step, minus 1"),
        text(LEFT, HEIGHT - 6, device, "faint"),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def images(report: dict[str, Any]) -> dict[str, str]:
    """The plots by their file names."""
    return {f"regret-{theme}.svg": svg(report, theme) for theme in COLOURS}


def section(report: dict[str, Any]) -> str:
    """The plots and the tables as Markdown, for a page in a folder of the docs."""
    device = report["device"].get("name") or report["device"].get("type", "")
    lines = [f"### Measured on {device}", ""]
    for name, theme in zip(images(report), COLOURS, strict=True):
        lines.append(f"![Share of steps up to each regret, a line a policy](../assets/{name}#only-{theme})")
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
