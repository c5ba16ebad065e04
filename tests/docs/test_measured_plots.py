"""Plots and tables are drawn from the measured results, and say what these say; results that are there are on the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
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
    root = ET.fromstring(plot.svg(REGRET, "dark"))
    lines = {line[0].text: line.get("d", "") for line in root.iter(f"{SVG}path") if len(line)}
    assert set(lines) == {"priorities", "packaged table"}
    ends = {float(path.split("V")[-1].partition("H")[0]) for path in lines.values()}
    assert ends == {plot.TOP}
    ticks = {each.text: float(each.get("x", 0)) for each in root.iter(f"{SVG}text")}
    # Half of the steps have no regret, and the other one 50 %.
    assert re.fullmatch(rf"M{plot.LEFT}.0 \S+H{plot.LEFT}.0V\S+H{ticks['50 %']}V\S+H\S+", lines["priorities"])


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
