"""How fast attnplug is beside the best peer, from measured results: `python docs/peer_plots.py` writes the page's tables."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plots import THEMES, Words, marks

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks/results/attention-h200.json"
PAGE = DOCS / "performance/index.md"
START, END = "<!-- what follows is written by docs/peer_plots.py -->", "<!-- end of what is written -->"

PEERS = ("FlashInfer", "FlashAttention 4", "FlashAttention 2", "cuDNN SDPA")
# The selection if every library is installed, and the backend that needs no library.
PLAN, ALONE = "FLASH_ATTN_4+TRITON", "TRITON"
NAMES = {PLAN: "attnplug, libraries installed", ALONE: "attnplug, TRITON alone"}
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


def images() -> dict[str, str]:
    """The plots by their file names: 1 is the best peer, and right of it is faster."""
    result = json.loads(RESULTS.read_text())
    note = f"{result['device']}, {result['date'][:10]}; heads are query/KV/size"
    found = {}
    for picture in PICTURES:
        drawn = []
        for row in rows(result, picture):
            speeds = {words: row.speed(name) for name, words in NAMES.items()}
            drawn.append((row.label, {words: speed for words, speed in speeds.items() if speed is not None}))
        words = Words(
            picture.title, "speed relative to the fastest of the peers called directly (1x is equal)", note
        )
        for theme in THEMES:
            found[f"peers-{picture.name}-{theme}.svg"] = marks(words, drawn, theme, base=1)
    return found


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


def filled(page: str) -> str:
    """The page with the plots and the figures of today's results."""
    result, sections = json.loads(RESULTS.read_text()), []
    for picture in PICTURES:
        shown = "\n".join(
            f"![Speed against the best peer, a mark for each cell](../assets/peers-{picture.name}-{theme}.svg#only-{theme})"
            for theme in THEMES
        )
        sections.append(f"## {picture.title}\n\n{shown}\n\n{table(rows(result, picture))}")
    before, _, rest = page.partition(START)
    after = rest.partition(END)[2]
    return f"{before}{START}\n\n" + "\n\n".join(sections) + f"\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
