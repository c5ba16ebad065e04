"""Draws how fast attnplug is beside the best peer, from measured results: `python docs/peer_plots.py`.

It writes `docs/assets/peers-KIND-light.svg` and `-dark.svg`, and the tables of `docs/performance/index.md`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks/results/attention-h200.json"
PAGE = DOCS / "performance/index.md"
START, END = "<!-- what follows is written by docs/peer_plots.py -->", "<!-- end of what is written -->"

PEERS = ("FlashInfer", "FlashAttention 4", "FlashAttention 2", "cuDNN SDPA")
# The selection if every library is installed, and the backend that needs no library.
PLAN, ALONE = "FLASH_ATTN_4+TRITON", "TRITON"
GIVEN = ", keys given"
# The new keys and values of whole prompts come from the call: so an engine runs them, and so do peers that can.
WHOLE_PROMPTS = ("prefill",)


@dataclass(frozen=True)
class Picture:
    """One plot: its title, the kinds of cells in it, and what its rows are called."""

    name: str
    title: str
    kinds: tuple[str, ...]


PICTURES = (
    Picture("decode", "Decode: one new token a request", ("decode",)),
    Picture("prefill", "Prefill, extend and mixed steps", ("prefill", "extend", "mixed")),
    Picture(
        "features",
        "Decode with uneven lengths, windows, caps, sinks, fp8",
        ("skew", "window", "feature", "fp8"),
    ),
)

COLOURS = {
    "light": {
        "text": "#1f2430",
        "faint": "#626978",
        "grid": "#d9dce3",
        "plan": "#3f51b5",
        "alone": "#c2570c",
    },
    "dark": {"text": "#e6e8ee", "faint": "#a3a9b8", "grid": "#454b5a", "plan": "#9fa8ff", "alone": "#ffab6b"},
}

WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 560, 18, 34, 38, 104, 60


@dataclass(frozen=True)
class Row:
    """One cell: the best peer's time in us, and how many times as fast attnplug's two ways are."""

    label: str
    peer: str
    peer_us: float
    us: dict[str, float]

    def speed(self, name: str) -> float | None:
        """The speed as a multiple of the best peer's; None where `name` was not run."""
        return self.peer_us / self.us[name] if name in self.us else None


def rows(result: dict[str, Any], picture: Picture) -> list[Row]:
    """The cells of a picture, in the order of the benchmark."""
    found = []
    for cell in result["cells"]:
        if cell["kind"] not in picture.kinds:
            continue
        us = cell["us"]
        peer = min((name for name in PEERS if name in us), key=us.__getitem__)
        given = GIVEN if cell["kind"] in WHOLE_PROMPTS else ""
        ours = {name: us[name + given] for name in (PLAN, ALONE) if name + given in us}
        found.append(Row(_label(cell), peer, us[peer], ours))
    return found


def _label(cell: dict[str, Any]) -> str:
    """The cell's name in words, with its heads."""
    heads = "/".join(map(str, cell["heads"]))
    name = {"both": "60 decodes of 8k and a prefill of 4k"}.get(cell["cell"], cell["cell"])
    before = {"prefill": "prefill ", "extend": "extend "}.get(cell["kind"], "")
    return f"{before}{name} ({heads})"


def svg(picture: Picture, found: list[Row], device: str, date: str, theme: str) -> str:
    """The plot: one line for each cell, 1 is the best peer, and right of it is faster."""
    colour = COLOURS[theme]
    speeds = [speed for row in found for name in (PLAN, ALONE) if (speed := row.speed(name))]
    low, high = min(0.5, *speeds) // 0.25 * 0.25, max(1.25, -(-max(speeds) // 0.25) * 0.25)
    height = TOP + ROW * len(found) + BOTTOM

    def across(speed: float) -> float:
        return round(LEFT + (speed - low) / (high - low) * (WIDTH - LEFT - RIGHT), 1)

    def text(
        x: float,
        y: float,
        words: str,
        of: str = "text",
        size: int = 14,
        anchor: str = "start",
        more: str = "",
    ) -> str:
        return (
            f'<text x="{x}" y="{y}" fill="{colour[of]}" font-size="{size}" text-anchor="{anchor}"{more}>'
            f"{escape(words)}</text>"
        )

    bold = ' font-weight="600"'
    box = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    words = f'aria-label="{escape(picture.title)}: speed against the best peer"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" font-family="system-ui, sans-serif" {words}>',
        text(LEFT, 22, picture.title, size=17, more=bold),
        *_legend(colour, text),
        text(across(1) - 8, TOP - 12, "← slower than the best peer", "faint", 12, "end"),
        text(across(1) + 8, TOP - 12, "faster →", "faint", 12),
    ]
    bottom = TOP + ROW * len(found)
    tick = low
    while tick <= high + 1e-9:
        at, strong = across(tick), abs(tick - 1) < 1e-9
        # A line of the grid is broken where labels are.
        path = "".join(f"M{at} {TOP + ROW * number + 18}v16" for number in range(len(found)))
        stroke = colour["faint" if strong else "grid"]
        parts.append(f'<path d="{path}" stroke="{stroke}" stroke-width="{2 if strong else 1}"/>')
        parts.append(text(at, bottom + 18, f"{tick:g}x", "text" if strong else "faint", 12, "middle"))
        tick += 0.25
    for number, row in enumerate(found):
        parts += _line(row, TOP + ROW * number, across, colour, text)
    parts += [
        text(
            LEFT,
            bottom + 38,
            "speed relative to the fastest of the peers called directly (1x is equal)",
            "text",
            12,
        ),
        text(LEFT, bottom + 54, f"{device}, {date}; heads are query/KV/size", "faint", 12),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend(colour: dict[str, str], text: Any) -> list[str]:
    second = LEFT + 250
    return [
        f'<rect x="{LEFT}" y="36" width="11" height="11" transform="rotate(45 {LEFT + 5.5} 41.5)" fill="{colour["plan"]}"/>',
        text(LEFT + 20, 46, "attnplug, libraries installed", size=13),
        f'<circle cx="{second + 6}" cy="41.5" r="6" fill="{colour["alone"]}"/>',
        text(second + 18, 46, "attnplug, TRITON alone", size=13),
        text(
            LEFT, 68, "peers: " + ", ".join(name for name in PEERS if name != "FlashAttention 2"), "faint", 12
        ),
    ]


def _line(row: Row, top: int, across: Any, colour: dict[str, str], text: Any) -> list[str]:
    """A cell's label, a line from the peer to each of our speeds, and their marks."""
    at = top + 26
    parts = [text(LEFT, top + 13, row.label, size=13)]
    for name, of in ((ALONE, "alone"), (PLAN, "plan")):
        speed = row.speed(name)
        if speed is None:
            continue
        end = across(speed)
        parts.append(
            f'<line x1="{across(1)}" y1="{at}" x2="{end}" y2="{at}" stroke="{colour[of]}" stroke-width="2"/>'
        )
        mark = (
            f'<rect x="{end - 4.5}" y="{at - 4.5}" width="9" height="9" transform="rotate(45 {end} {at})" fill="{colour[of]}">'
            if of == "plan"
            else f'<circle cx="{end}" cy="{at}" r="5" fill="{colour[of]}">'
        )
        parts.append(
            f"{mark}<title>{name}: {speed:.2f}x {row.peer}</title></{'rect' if of == 'plan' else 'circle'}>"
        )
    return parts


def table(found: list[Row]) -> str:
    """The figures of a plot."""
    lines = [
        f"| cell | best peer | its time, us | `{PLAN}` | `{ALONE}` |",
        "|---|---|---:|---:|---:|",
    ]
    for row in found:
        shown = ["-" if (speed := row.speed(name)) is None else f"{speed:.2f}x" for name in (PLAN, ALONE)]
        time = f"{row.peer_us:.1f}" if row.peer_us < 100 else f"{row.peer_us:.0f}"
        lines.append(f"| {row.label} | {row.peer} | {time} | {shown[0]} | {shown[1]} |")
    return "\n".join(lines)


def files(result: dict[str, Any], page: str) -> dict[Path, str]:
    """The text of each file to write, by path."""
    device, date = result["device"], result["date"][:10]
    written, sections = {}, []
    for picture in PICTURES:
        found = rows(result, picture)
        for theme in COLOURS:
            path = DOCS / "assets" / f"peers-{picture.name}-{theme}.svg"
            written[path] = svg(picture, found, device, date, theme)
        images = "\n".join(
            f"![Speed against the best peer, a mark for each cell](../assets/peers-{picture.name}-{theme}.svg#only-{theme})"
            for theme in COLOURS
        )
        sections.append(f"## {picture.title}\n\n{images}\n\n{table(found)}")
    before, _, rest = page.partition(START)
    after = rest.partition(END)[2]
    written[PAGE] = f"{before}{START}\n\n" + "\n\n".join(sections) + f"\n\n{END}{after}"
    return written


if __name__ == "__main__":
    for path, content in files(json.loads(RESULTS.read_text()), PAGE.read_text()).items():
        path.write_text(content)
