"""Draws which backend serves each example model on each GPU: `python docs/model_grid.py`; `--check` only compares."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

from attnplug.cli.output.output import features_in_words
from attnplug.core import LayerSpec, Phase
from attnplug.matrix.words import COLOURS, letters
from attnplug.planning import decide_model
from attnplug.registry.default import get_registry
from attnplug.registry.devices import resolve_device

ROOT = Path(__file__).parents[1]
LAYERS = ROOT / "benchmarks" / "model_layers.json"
"""The layers of `examples/models`, as benchmarks/model_plans.py has read them."""
ASSETS = ROOT / "docs" / "assets"

GPUS = ("T4", "A100", "L40S", "H100", "B200", "MI300X")
LABELS = {
    "FLASHINFER": "FI",
    "TRITON": "Triton",
    "FLASH_MLA": "MLA",
    "FLASH_ATTN_4": "FA4",
    "FLASH_ATTN_3": "FA3",
    "FLASH_ATTN_2": "FA2",
    "TORCH": "torch",
}
BACKENDS = {name: (label, COLOURS[name][0]) for name, label in LABELS.items()}
"""The label and the colour of each backend."""
NOBODY = ("none", "#b42318")
THEMES = {"light": ("#1f2328", "#59636e"), "dark": ("#e6edf3", "#9ba5b0")}
"""The colours of names and of notes, on a page of each theme."""

LEFT, TOP, WIDTH, HEIGHT, GAP = 216, 46, 100, 24, 4


@dataclasses.dataclass(frozen=True)
class Row:
    """Layers of one model that have the same backends on every GPU.

    Args:
        name: the model, with the kinds of these layers if other layers have other backends.
        served: by GPU, the backends that prefill and decode these layers.
    """

    name: str
    served: tuple[tuple[str, str], ...]


def rows() -> list[Row]:
    """The models in the order of their names."""
    found = []
    for model, told in json.loads(LAYERS.read_text()).items():
        specs = {str(i): LayerSpec.from_dict(kind["spec"]) for i, kind in enumerate(told["kinds"])}
        by_gpu = [_served(specs, gpu) for gpu in GPUS]
        alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for name, spec in specs.items():
            alike.setdefault(tuple(each[name] for each in by_gpu), []).append(features_in_words(spec))
        for served, kinds in alike.items():
            found.append(Row(model if len(alike) == 1 else f"{model} ({', '.join(kinds)})", served))
    return found


def _served(specs: dict[str, LayerSpec], gpu: str) -> dict[str, tuple[str, str]]:
    """By layer, the backends of prefill and decode with every library that such a machine could install."""
    decisions, *_ = decide_model(get_registry(), specs, resolve_device(gpu), {"assume_installed": "all"})
    return {
        name: (decision.members[Phase.PREFILL], decision.members[Phase.DECODE])
        for name, decision in decisions.items()
    }


def picture(found: list[Row], theme: str) -> str:
    """The grid as SVG, on a transparent ground."""
    ink, note = THEMES[theme]
    right = LEFT + len(GPUS) * (WIDTH + GAP) - GAP
    bottom = TOP + len(found) * (HEIGHT + GAP)
    shown = {name for row in found for pair in row.served for name in pair}
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {right} {bottom + 84}" role="img" '
            'font-family="system-ui, sans-serif" font-size="13" text-anchor="middle">'
        ),
        "<title>The backends of each example model on each GPU</title>",
        *_heads(ink, note),
    ]
    for index, row in enumerate(found):
        top = TOP + index * (HEIGHT + GAP)
        lines.append(_text(0, top + 16, row.name, ink, 'text-anchor="start"'))
        for column, pair in enumerate(row.served):
            lines += _cell(LEFT + column * (WIDTH + GAP), top, pair)
    words = "One name: the backend prefills and decodes. Two names: the first prefills, the second decodes."
    lines.append(_text(0, bottom + 18, words, note, 'text-anchor="start"'))
    at, down = 0, bottom + 28
    for name, (label, colour) in BACKENDS.items():
        if name in shown:
            said = f"{letters(BACKENDS)[name]} = {name}"
            width = 70 + 7 * len(said)
            if at + width > right:
                at, down = 0, down + HEIGHT + GAP
            lines += _box(at, down, 52, label, colour)
            lines.append(_text(at + 58, down + 16, said, ink, 'text-anchor="start" font-size="12"'))
            at += width
    return "\n".join([*lines, "</svg>\n"])


def _heads(ink: str, note: str) -> Iterator[str]:
    for column, gpu in enumerate(GPUS):
        middle = LEFT + column * (WIDTH + GAP) + WIDTH // 2
        yield _text(middle, 18, gpu, ink, 'font-weight="600"')
        yield _text(middle, 35, str(resolve_device(gpu)), note, 'font-size="11"')


def _cell(left: int, top: int, pair: tuple[str, str]) -> Iterator[str]:
    names = pair[:1] if pair[0] == pair[1] else pair
    width = (WIDTH - (len(names) - 1)) // len(names)
    for index, name in enumerate(names):
        yield from _box(left + index * (width + 1), top, width, *BACKENDS.get(name, NOBODY))


def _box(left: int, top: int, width: int, label: str, colour: str) -> Iterator[str]:
    yield f'<rect x="{left}" y="{top}" width="{width}" height="{HEIGHT}" rx="3" fill="{colour}"/>'
    yield _text(left + width // 2, top + 16, label, "#ffffff", 'font-size="12"')


def _text(x: int, y: int, words: str, colour: str, more: str) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" {more}>{escape(words)}</text>'


def main(arguments: list[str]) -> int:
    """Write both pictures; with `--check` only say which are stale, and fail if one is."""
    found = rows()
    made = {ASSETS / f"model-grid-{theme}.svg": picture(found, theme) for theme in THEMES}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale; run: python docs/model_grid.py")
        return 1 if stale else 0
    for path, text in made.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    # The picture shows what attnplug ships, whatever else is installed or set where this runs.
    for variable in [name for name in os.environ if name.startswith(("ATTNPLUG_", "TRITON_"))]:
        del os.environ[variable]
    os.environ["ATTNPLUG_PLUGINS"] = ""
    sys.exit(main(sys.argv[1:]))
