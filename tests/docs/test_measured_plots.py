"""Plots and tables are drawn from the measured results, and say what these say; results that are there are on the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from drawn import marks_of, ticks_of
from fences import ROOT
from scripts import load_script


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


def test_marks_are_where_the_figures_are(plot: ModuleType) -> None:
    drawn = plot.images(report())["context-parallel-light.svg"]
    marks, ticks = marks_of(drawn), ticks_of(drawn)
    unit = ticks["2x"] - ticks["1x"]
    assert marks == {
        "measured | 8 x 128k | 2": pytest.approx(ticks["2x"]),
        "measured | small | 0.5": pytest.approx(ticks["1x"] - unit / 2),
        "model of the plan | 8 x 128k | 1.5": pytest.approx(ticks["1x"] + unit / 2),
    }


def test_the_section_has_the_plots_and_the_figures(plot: ModuleType) -> None:
    found = plot.section(report())
    for line in (
        "| 8 x 128k | 1,000 | 500 | 2.00x | 1.50x |",
        "| small | 10 | 20 | 0.50x |  |",
        "| `a2a` | 21.2 | 13.2 |",
        "In 16GiB a rank, 2,000 tokens fit instead of 1,000: 2.00 x.",
        "are: llama 2.0e-03.",
    ):
        assert line in found
    assert "without times" not in found
    assert "failed" not in found
    for name, image in plot.images(report()).items():
        assert f"(../assets/{name}#only-" in found
        ET.fromstring(image)


REGRET = {
    "device": {"type": "cuda", "name": "a GPU"},
    "cells": [
        {"regret": {"priorities": 0.5, "packaged table": 0.0}},
        {"regret": {"priorities": 0.0, "packaged table": 0.02}},
    ],
}
ENGINE = {
    "settings": {"requests": 64, "prompt": 4096},
    "models": [
        {"model": "m", "engine": "engine", "ratio": {"decode": 1.25}}
        | {"decode_tokens_s": {"default": 1000.0, "tuned": 1250.0}},
        {"model": "n", "engine": "engine", "failed": "no"},
    ],
}


def test_lines_of_regret_end_where_all_steps_are() -> None:
    plot = load_script(ROOT / "docs" / "regret_plot.py")
    drawn = plot.images(REGRET)["regret-dark.svg"]
    ticks = ticks_of(drawn)
    lines = {}
    for name in ("priorities", "packaged table"):
        path = drawn.partition(f'id="{name}"')[2].partition('d="')[2].partition('"')[0]
        lines[name] = [tuple(map(float, each)) for each in re.findall(r"[ML] (\S+) (\S+)", path)]
    ends = {points[-1][1] for points in lines.values()}
    assert len(ends) == 1
    # Half of the steps have no regret, and the other one 50 % or 2 %.
    half = (lines["priorities"][0][1] + ends.pop()) / 2
    assert (ticks["0 %"], pytest.approx(half)) in lines["priorities"]
    assert lines["priorities"][-1][0] == pytest.approx(ticks["50 %"])
    assert lines["packaged table"][-1][0] == pytest.approx(ticks["0 %"] + (ticks["50 %"] - ticks["0 %"]) / 25)


def test_regret_and_tokens_are_in_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plot = load_script(ROOT / "docs" / "regret_plot.py")
    monkeypatch.setattr(plot, "ENGINE", tmp_path / "engine.json")
    assert "tokens/s" not in plot.section(REGRET)
    plot.ENGINE.write_text(json.dumps(ENGINE))
    found = plot.section(REGRET)
    assert "| priorities | 25.0 % | 50.0 % | 50.0 % |" in found
    assert "| packaged table | 1.0 % | 2.0 % | 2.0 % |" in found
    assert "| m | engine | decode | 1,000 | 1,250 | 1.25x |" in found
    assert "| n |" not in found


def test_a_page_has_the_results_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = load_script(ROOT / "docs" / "hooks" / "measured.py")
    modules = hook.plots()
    markers = [module.MARKER for module in modules]
    pages = [
        (ROOT / "docs" / page).read_text() for page in ("concepts/context-parallel.md", "guides/tune.md")
    ]
    assert [page.count(marker) for page, marker in zip(pages, markers, strict=True)] == [1, 1]
    monkeypatch.setattr(hook, "plots", lambda: modules)
    for number, module in enumerate(modules):
        module.RESULTS = tmp_path / f"{number}.json"
    assert hook.on_page_markdown(f"before {markers[0]} after") == "before  after"
    modules[1].RESULTS.write_text(json.dumps(REGRET))
    assert "| priorities | 25.0 %" in hook.on_page_markdown(markers[1])
    assert hook.on_page_markdown(markers[0]) == ""
    assert [module for module, _ in hook.measured()] == [modules[1]]
