"""Draws the plots of the site by matplotlib, for a light and a dark page; `docs/hooks/measured.py` makes them with the site."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

THEMES = {
    "light": {"text": "#1f2430", "faint": "#626978", "grid": "#d9dce3", "page": "#ffffff"},
    "dark": {"text": "#e6e8ee", "faint": "#a3a9b8", "grid": "#454b5a", "page": "#1e2129"},
}
COLOURS = {"light": ("#3f51b5", "#c2570c", "#1b7f5c"), "dark": ("#9fa8ff", "#ffab6b", "#67d3a8")}
"""The colours of what a plot compares, in its order."""
MARKERS = ("D", "o", "s")
INCHES = 5.6
"""So narrow that a phone shows text of readable size."""


@dataclass(frozen=True)
class Words:
    """The words around a plot.

    Args:
        title: above it.
        axis: what the horizontal axis says.
        note: the device and the date, below it.
    """

    title: str
    axis: str
    note: str


def marks(
    words: Words, rows: Sequence[tuple[str, dict[str, float]]], theme: str, *, base: float | None = None
) -> str:
    """A line for each row with a mark for each of its values, as SVG.

    Args:
        words: around the plot.
        rows: each row's label, and its values by name; the first row need not have all names.
        theme: "light" or "dark".
        base: the value that others are compared with: lines go from it to each mark, and values are multiples such as
            2x. None: values are shares, and 1 is the ceiling.
    """
    names = list(dict.fromkeys(name for _, values in rows for name in values))
    tick = (lambda value, _=None: f"{value:.0%}") if base is None else (lambda value, _=None: f"{value:g}x")

    # Small differences are not drawn large: every plot has an axis of at least this range.
    step, low, high = (0.2, 0.0, 1.0) if base is None else (0.25, 0.5, 1.25)
    low = min(low, *(value for _, values in rows for value in values.values())) // step * step
    high = -(-max(high, *(value for _, values in rows for value in values.values())) // step) * step

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MultipleLocator

        colour = THEMES[theme]
        axes.axvline(1, color=colour["faint"], linewidth=2, zorder=0)
        # Lines of the grid do not cross a label, and no mark is behind one.
        behind = {"facecolor": colour["page"], "edgecolor": "none", "pad": 1}
        place_of = {"transform": axes.get_yaxis_transform(), "zorder": 1, "bbox": behind}
        for place, (label, values) in enumerate(rows):
            axes.text(0, place - 0.28, label, color=colour["text"], **place_of)
            # The first name comes last, so that no other mark hides it.
            for name, value in sorted(values.items(), key=lambda each: -names.index(each[0])):
                number = names.index(name)
                line = COLOURS[theme][number % 3]
                if base is not None:
                    axes.plot([base, value], [place, place], color=line)
                axes.plot(
                    [value], [place], MARKERS[number % 3], color=line, gid=f"{name} | {label} | {value:.4g}"
                )
        for number, name in enumerate(names):
            axes.plot([], [], MARKERS[number % 3], color=COLOURS[theme][number % 3], label=name)
        axes.set_ylim(len(rows) - 0.4, -0.7)
        axes.set_yticks([])
        axes.xaxis.set_major_formatter(tick)
        axes.xaxis.set_major_locator(MultipleLocator(step))
        axes.set_xlim(low - step / 8, high + step / 8)

    return _svg(words, draw, theme, height=1.5 + 0.36 * len(rows))


def distributions(words: Words, values: dict[str, Sequence[float]], theme: str) -> str:
    """The share of values up to each value, a line for each name, as SVG; values are in percent."""

    def draw(axes: Axes) -> None:
        for number, (name, each) in enumerate(values.items()):
            axes.ecdf(list(each), label=name, color=COLOURS[theme][number % 3], linewidth=2, gid=name)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter("{x:g} %")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")

    return _svg(words, draw, theme, height=3.6)


def _svg(words: Words, draw: Callable[[Axes], None], theme: str, height: float) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    colour = THEMES[theme]
    settings = {
        "svg.fonttype": "none",
        # The same plot has the same bytes in every build.
        "svg.hashsalt": "attnplug",
        "font.family": "sans-serif",
        "font.size": 9,
        "text.color": colour["text"],
        "axes.labelcolor": colour["text"],
        "xtick.color": colour["faint"],
        "ytick.color": colour["faint"],
    }
    with mpl.rc_context(settings):
        figure = Figure(figsize=(INCHES, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_axisbelow(True)
        axes.grid(axis="x", color=colour["grid"])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        draw(axes)
        axes.set_title(words.title, loc="left", fontsize=12, pad=30)
        axes.set_xlabel(f"{words.axis}\n{words.note}", loc="left")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, borderaxespad=0.2)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Title": words.title})
    # The fonts of the page, in place of the names of matplotlib's.
    return re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", text.getvalue())
