"""The goals of benchmarks/mla.py, as ratios within one run; a goal without a measured cell is left out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from mla_latents import TOLERANCE

__all__ = ["judged"]

_OF_COPY = {"64 x 8192, 16 heads": 0.92, "8 x 32768, 16 heads": 0.82, "64 x 8192, 32 heads": 0.85,
            "64 x 8192, 64 heads": 0.60}  # fmt: skip
_TFLOPS = {"64 x 8192, 128 heads": (330, 500)}
_LARGE = 256e6
"""Bytes of latents from which the rate of a kernel counts, and not its launch."""


class _Goals(list[dict[str, Any]]):
    def add(self, name: str, value: float, limit: float, *, at_least: bool = False) -> None:
        met = value >= limit if at_least else value <= limit
        words = f"{'>=' if at_least else '<='} {limit:g}"
        self.append({"name": name, "value": value, "goal": words, "met": met})

    def least(self, name: str, ratios: Mapping[str, float], limit: float) -> None:
        if ratios:
            cell = min(ratios, key=ratios.__getitem__)
            self.add(f"{name}, least ({cell})", ratios[cell], limit, at_least=True)

    def most(self, name: str, ratios: Mapping[str, float], limit: float) -> None:
        if ratios:
            cell = max(ratios, key=ratios.__getitem__)
            self.add(f"{name}, most ({cell})", ratios[cell], limit)


def judged(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each goal with its name, value, limit in words, and whether it is met; NaN meets none."""
    goals = _Goals()
    _decodes(goals, report.get("cells", ()), report.get("copy_tbps", math.nan))
    for row in report.get("prefill", ()):
        name, us = row["chosen"], row["us"]
        if name in us and row["cell"].startswith("4 x 4096"):
            parts = us[f"{name}, kernel alone"] + us["product"]
            goals.add(
                f"prefill {row['cell']} by {name} against its kernel and product", us[name] / parts, 1.05
            )
    for row in report.get("chunked", ()):
        for title, distance in row["from_one_pass"].items():
            if title != "one pass":
                worst = max(distance, row["relative_errors"][title])
                goals.add(f"context {row['cell']} in {title} against one pass, error", worst, TOLERANCE)
    for row in report.get("selection", ()):
        us, dense = dict(row["us"]), row["us"].get("dense")
        chosen = [spent for name, spent in us.items() if name != "dense"]
        title = f"{row['topk']} chosen keys, {row['heads']} heads"
        if dense and chosen:
            goals.add(f"{title}, against a dense decode of {row['topk']}", max(chosen) / dense, 1.3)
        if len(chosen) > 1:
            goals.add(
                f"{title}, longest time of a context against the shortest", max(chosen) / min(chosen), 1.05
            )
    for row in report.get("host", ()):
        if row["backend"] == "FLASHINFER" and "besides_us" in row:
            title = f"FLASHINFER's builder, {row['requests']} requests"
            goals.add(f"{title}, us besides planning", row["besides_us"], 60)
            goals.add(f"{title}, waits for the device", row["waits"], 0)
    return goals


def _decodes(goals: _Goals, cells: Iterable[Mapping[str, Any]], copy_tbps: float) -> None:
    by_name = {cell["cell"]: cell for cell in cells}
    mine = {name: cell for name, cell in by_name.items() if "TRITON" in cell["us"]}
    ours = {name: cell["us"]["TRITON"] for name, cell in mine.items()}
    for name, limit in _OF_COPY.items():
        if name in ours:
            share = mine[name]["bytes"] / ours[name] / 1e6 / copy_tbps
            goals.add(f"TRITON {name}, share of copy", share, limit, at_least=True)
    for name, (limit, stretch) in _TFLOPS.items():
        if name in ours:
            rate = mine[name]["flops"] / ours[name] / 1e6
            goals.add(f"TRITON {name}, TFLOP/s", rate, limit, at_least=True)
            goals.add(f"TRITON {name}, TFLOP/s, beyond the goal", rate, stretch, at_least=True)

    def against(peer: str, heads: tuple[int, ...], least_bytes: float = 0.0) -> dict[str, float]:
        plain = [
            name
            for name, cell in mine.items()
            if cell["heads"] in heads and cell["queries"] == 1 and cell["page"] == 64
            and cell["stored"] == cell["dtype"] and cell["bytes"] >= least_bytes and peer in cell["us"]
        ]  # fmt: skip
        return {name: mine[name]["us"][peer] / ours[name] for name in plain}

    ratios = against("FlashInfer fa3", (16, 32))
    if ratios:
        mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
        goals.add(
            f"TRITON against FlashInfer fa3, geometric mean of {len(ratios)}", mean, 0.95, at_least=True
        )
    for heads, limit in ((16, 2.0), (128, 5.0)):
        goals.least(
            f"TRITON against vLLM's kernel, {heads} heads", against("vLLM Triton", (heads,), _LARGE), limit
        )
    several, rounded = {}, {}
    for name, cell in mine.items():
        base = f"{cell['requests']} x {cell['length']}, {cell['heads']} heads"
        if cell["heads"] == 16 and base in ours and cell["page"] == 64:
            if name == f"{base}, 4 queries":
                several[name] = ours[name] / ours[base]
            if name == f"{base}, fp8":
                rounded[name] = ours[name] / ours[base]
    goals.most("TRITON 4 queries against one, 16 heads", several, 1.25)
    goals.most("TRITON fp8 latents against bfloat16, 16 heads", rounded, 0.65)
    direct = {
        name: cell["us"]["FLASHINFER"] / cell["us"]["FlashInfer fa3"]
        for name, cell in by_name.items()
        if {"FLASHINFER", "FlashInfer fa3"} <= set(cell["us"])
    }
    goals.most("FLASHINFER against FlashInfer called directly", direct, 1.02)
