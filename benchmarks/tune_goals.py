"""The goals of measured selection, and whether the figures of benchmarks/tune_models.py meet them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from goal import Goal

LEAST_CELLS, LEAST_MODELS = 60, 6
BACKENDS = ("TRITON", "FLASHINFER", "FLASH_ATTN_4", "FLASH_ATTN_2", "TORCH")
KINDS = ("decode", "prefill", "ragged", "speculative")
TABLE_LIMITS = {"mean": 0.015, "p95": 0.05, "worst": 0.10}
PRIORITIES_MEAN, OVER_DEFAULT = 0.06, 0.02
LEAST_ALIKE, CLEAR = 0.95, 0.04
FIRST_SECONDS, AGAIN_SECONDS = 300.0, 60.0
WARM_US, FIRST_US = 8.0, 20.0
SHAPES = 3


def at_most(name: str, value: float | None, limit: float, unit: str, scale: float = 1.0) -> Goal:
    """A goal with an upper limit."""
    text = None if value is None else f"{scale * value:.1f} {unit}"
    return Goal(name, text, f"at most {scale * limit:g} {unit}", None if value is None else value <= limit)


def goals(held: Mapping[str, Any], alike: Mapping[str, float], figures: Mapping[str, Any]) -> list[Goal]:
    """Every goal of measured selection.

    Args:
        held: of the cells held back: "cells", "models", "kinds" and "backends" that were measured, and "policies", the
            summaries by name.
        alike: of two runs: "share" of the cells with one choice, and "gap", the widest where they are not; or empty.
        figures: "first_s" and "again_s" of gemma-3-27b, "warm_us" and "first_us" of a selection, and "engine", the
            report of benchmarks/tuned_engine.py; those that were measured.
    """
    return [*_of_cells(held), *_of_regret(held["policies"]), *_of_runs(alike), *_of_figures(figures)]


def _of_cells(held: Mapping[str, Any]) -> Iterator[Goal]:
    cells, models = held["cells"], held["models"]
    met = cells >= LEAST_CELLS and models >= LEAST_MODELS
    limit = f"at least {LEAST_CELLS} of {LEAST_MODELS}"
    yield Goal("cells held back", f"{cells} cells of {models} models", limit, met)
    for what, wanted in (("kinds", KINDS), ("backends", BACKENDS)):
        missing = [name for name in wanted if name not in held[what]]
        value = "all measured" if not missing else f"not measured: {', '.join(missing)}"
        yield Goal(f"{what} of cells" if what == "kinds" else what, value, ", ".join(wanted), not missing)


def _of_regret(policies: Mapping[str, Any]) -> Iterator[Goal]:
    for name, each in policies.items():
        if name == "priorities":
            yield at_most("regret of priorities, mean", each.mean, PRIORITIES_MEAN, "%", 100)
            continue
        for figure, limit in TABLE_LIMITS.items():
            yield at_most(f"regret of {name}, {figure}", getattr(each, figure), limit, "%", 100)
        yield at_most(f"{name}, slower than the default", each.over_default, OVER_DEFAULT, "%", 100)


def _of_runs(alike: Mapping[str, float]) -> Iterator[Goal]:
    share = alike.get("share")
    value = None if share is None else f"{100 * share:.1f} % of {alike['cells']:.0f} cells"
    limit = f"at least {100 * LEAST_ALIKE:g} %"
    yield Goal("two runs choose alike", value, limit, None if share is None else share >= LEAST_ALIKE)
    yield at_most("widest gap where they do not", alike.get("gap"), CLEAR, "%", 100)


def _of_figures(figures: Mapping[str, Any]) -> Iterator[Goal]:
    yield at_most("gemma-3-27b at 1, 8, 64", figures.get("first_s"), FIRST_SECONDS, "s")
    yield at_most("the same again", figures.get("again_s"), AGAIN_SECONDS, "s")
    yield at_most("select with a table, warm", figures.get("warm_us"), WARM_US, "us")
    yield at_most("what a table adds to a first select", figures.get("first_us"), FIRST_US, "us")
    rows = figures.get("engine", {}).get("models", ())
    fine = [row for row in rows if "failed" not in row]
    words = "; ".join(
        f"{row['model']}: " + ", ".join(f"{phase} {ratio:.2f}x" for phase, ratio in row["ratio"].items())
        for row in fine
    )
    met = len({row["model"] for row in fine}) >= SHAPES if rows else None
    yield Goal("tokens/s end to end, by the table over by priority", words, f"{SHAPES} model shapes", met)


def kinds_of(shapes: Sequence[Any]) -> list[str]:
    """The kinds of steps among some shapes."""
    found = {str(shape.phase) for shape in shapes if shape.phase is not None}
    found |= {"ragged" for shape in shapes if shape.ragged}
    found |= {"speculative" for shape in shapes if str(shape.phase) == "decode" and shape.query > 1}
    return sorted(found)
