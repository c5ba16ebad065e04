"""The rows of benchmarks/context_parallel.py and their goals; it imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from goal import Goal

MOST_EXCHANGE_US, LEAST_CAPACITY = 40.0, 1.95


@dataclasses.dataclass(frozen=True)
class Cell:
    """A step of requests of these lengths, the last `new` tokens of each new.

    Args:
        name: of the cell.
        lengths: tokens of each request, the new ones included.
        least: the least ratio of one GPU's time to that of the ranks; 0 for a cell without a limit.
        new: new tokens of each request.
        in_graph: whether a CUDA graph runs it.
    """

    name: str
    lengths: tuple[int, ...]
    least: float
    new: int = 1
    in_graph: bool = True


CELLS = [
    Cell("8 x 128k", (131_072,) * 8, 1.8),
    Cell("64 x 8k", (8192,) * 64, 1.65),
    Cell("1 x 128k", (131_072,), 1.25),
    Cell("8 x 8k", (8192,) * 8, 0.9),
    Cell("ragged", (131_072, 65_000, 8191, 8192, 700, 33, 1, 40_000), 0.9),
    Cell("8 x 32k, 4 new tokens", (32_768,) * 8, 0.0, new=4),
    Cell("prompt of 16k", (16_384,), 0.0, new=16_384, in_graph=False),
    Cell("8k after 120k", (131_072,), 0.0, new=8192, in_graph=False),
]
SMOKE_CELLS = [
    Cell("3 x 100", (100,) * 3, 0.0, in_graph=False),
    Cell("ragged", (70, 33, 1, 17), 0.0, in_graph=False),
    Cell("prompt of 48", (48,), 0.0, new=48, in_graph=False),
    Cell("40 after 60", (100,), 0.0, new=40, in_graph=False),
]
EXCHANGES = {
    "a2a": ("a2a", False),
    "a2a, scattered heads": ("a2a", True),
    "ag_rs": ("ag_rs", False),
    "ag_rs, scattered heads": ("ag_rs", True),
}
MODELS = ("llama", "gemma", "latents")
PARTS = ("exchange", "capacity", "cells", "models")


def rows(parts: Sequence[str], only: Sequence[str] | None, *, smoke: bool) -> list[tuple[str, str]]:
    """The rows to run, part and name, those that the issue of a short run needs first; `only` are parts of names."""
    names: dict[str, list[str]] = {
        # The exchange has times only.
        "exchange": [] if smoke else [*EXCHANGES],
        "capacity": ["64MiB a rank" if smoke else "16GiB a rank"],
        "cells": [cell.name for cell in (SMOKE_CELLS if smoke else CELLS)],
        "models": [*MODELS],
    }
    return [
        (part, name)
        for part in parts
        for name in names[part]
        if only is None or any(text in name for text in only)
    ]


def goals(report: Mapping[str, Any]) -> list[Goal]:
    """Each goal of context parallelism on two GPUs, from a report; a row that failed misses its goal."""
    return [*_of_outputs(report), *_of_capacity(report), *_of_times(report), *_of_exchange(report)]


def _row(report: Mapping[str, Any], part: str, name: str | None = None) -> dict[str, Any] | None:
    found = (row for row in report.get(part, ()) if name is None or row["name"] == name)
    return next(found, None)


def _of_outputs(report: Mapping[str, Any]) -> Iterator[Goal]:
    for name in MODELS:
        row = _row(report, "models", name)
        value = None if row is None else row.get("failed") or f"error {row['error']:.1e}"
        if row is not None and "error" in row and not row["deterministic"]:
            value = f"{value}, and unlike in a second run"
        limit = "within the tolerance of the dtype, equal in a second run"
        yield Goal(f"outputs of {name} equal one rank's", value, limit, None if row is None else row["ok"])


def _of_capacity(report: Mapping[str, Any]) -> Iterator[Goal]:
    row = _row(report, "capacity")
    value = None if row is None else row.get("failed") or f"{row['ratio']:.2f}x, allocated"
    limit = f"at least {LEAST_CAPACITY:g}x, in equal memory"
    yield Goal("KV capacity", value, limit, None if row is None else row["ok"])
    says = None if row is None else row.get("plan")
    yield Goal("the plan says from where sharing pays", says, "said", None if row is None else bool(says))


def _of_times(report: Mapping[str, Any]) -> Iterator[Goal]:
    for cell in CELLS:
        row = _row(report, "cells", cell.name)
        value, met = None, None
        if row is not None:
            value, met = row.get("failed") or "without times", row["ok"]
            if "ratio" in row:
                value = f"{row['ratio']:.2f}x one GPU"
                if "model_ratio" in row:
                    value += f", {row['model_ratio']:.2f}x by the model"
            elif "failed" not in row:
                met = None
        limit = f"at least {cell.least:g}x" if cell.least else "no limit of time"
        yield Goal(f"decode {cell.name}" if cell.in_graph else cell.name, value, limit, met)


def _of_exchange(report: Mapping[str, Any]) -> Iterator[Goal]:
    row = _row(report, "exchange", "a2a")
    value = None
    if row is not None:
        value = row.get("failed") or f"{row['us']:.1f} us, NCCL alone {row['nccl_us']:.1f}"
    limit = f"at most {MOST_EXCHANGE_US:g} us of a layer at 64 requests x 32 heads, captured"
    yield Goal("merge and collectives", value, limit, None if row is None else row["ok"])
