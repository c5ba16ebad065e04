"""The plot of context parallelism is drawn from the measured results, and says what these say."""

from __future__ import annotations

import json
import re
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from fences import ROOT
from scripts import load_script

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plot() -> ModuleType:
    return load_script(ROOT / "docs" / "context_parallel_plot.py")


def report() -> dict[str, Any]:
    times = {"one_us": 1000.0, "ranks_us": 500.0, "ratio": 2.0, "model_ratio": 1.5, "least": 1.8}
    slower = {"one_us": 10.0, "ranks_us": 20.0, "ratio": 0.5, "least": 0.0}
    return {
        "ranks": 2,
        "device": "a GPU",
        "torch": "2.11.0",
        "date": "2026-01-01T10:00:00+00:00",
        "cells": [
            {"name": "8 x 128k", "error": 1e-3} | times,
            {"name": "small", "error": 1e-3} | slower,
            {"name": "without times", "error": 1e-3},
            {"name": "that failed", "failed": "rank 1 ended with code 1", "ok": False},
        ],
        "exchange": [{"name": "a2a", "us": 21.25, "nccl_us": 13.2}],
        "models": [{"name": "llama", "error": 2e-3}, {"name": "latents", "failed": "late", "ok": False}],
        "capacity": [{"name": "16GiB a rank", "one_tokens": 1000, "ranks_tokens": 2000, "ratio": 2.0}],
    }


def test_what_is_kept_is_what_the_script_writes(plot: ModuleType) -> None:
    page = plot.PAGE.read_text()
    assert (plot.START in page) is plot.RESULTS.exists(), "run: python docs/context_parallel_plot.py"
    written = plot.files(json.loads(plot.RESULTS.read_text()), page) if plot.RESULTS.exists() else {}
    for path, content in written.items():
        assert path.read_text() == content, "run: python docs/context_parallel_plot.py"


def test_marks_are_where_the_figures_are(plot: ModuleType) -> None:
    root = ET.fromstring(plot.svg(report(), "light"))
    ticks = {
        text.text: float(text.get("x", 0))
        for text in root.iter(f"{SVG}text")
        if re.fullmatch(r"[\d.]+x", text.text or "")
    }
    measured = [each for each in root.iter(f"{SVG}circle") if len(each)]
    assert [float(each.get("cx", 0)) for each in measured] == [ticks["2x"], ticks["0.5x"]]
    rings = [each for each in root.iter(f"{SVG}circle") if each.get("fill") == "none"]
    # The first ring is that of the legend.
    assert [float(each.get("cx", 0)) for each in rings[1:]] == [ticks["1.5x"]]


def test_tables_replace_what_was_written_before(plot: ModuleType) -> None:
    page = f"before\n{plot.START}\nold\n{plot.END}\nafter\n"
    written = plot.files(report(), page)
    found = written[plot.PAGE]
    assert found.startswith("before\n")
    assert found.endswith("\nafter\n")
    assert "old" not in found
    for line in (
        "| 8 x 128k | 1,000 | 500 | 2.00x | 1.50x |",
        "| small | 10 | 20 | 0.50x |  |",
        "| `a2a` | 21.2 | 13.2 |",
        "In 16GiB a rank, 2,000 tokens fit instead of 1,000: 2.00 x.",
    ):
        assert line in found
    assert "without times" not in found
    assert "failed" not in found
    assert "are: llama 2.0e-03." in found
    assert {path.name for path in written} == {
        "context-parallel-light.svg",
        "context-parallel-dark.svg",
        "context-parallel.md",
    }
