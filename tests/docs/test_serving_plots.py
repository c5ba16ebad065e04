"""The plots of real batches are drawn from the measured results, and mark the figures."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from drawn import marks_of, ticks_of
from fences import ROOT
from scripts import load_script

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    return load_script(ROOT / "docs" / "serving_plots.py")


def test_the_page_has_the_figures_of_the_results(plots: ModuleType) -> None:
    page = plots.PAGE.read_text()
    assert plots.filled(page) == page, "run: python docs/serving_plots.py"


def test_each_cell_of_triton_is_in_one_plot(plots: ModuleType) -> None:
    result = json.loads(plots.RESULTS.read_text())
    drawn = [row for picture in plots.PICTURES for row in plots.rows(result, picture)]
    assert len(drawn) == sum(plots.OURS in cell["us"] for cell in result["cells"]) > 20


def test_marks_are_at_the_share_of_the_ceiling(
    plots: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = {"cell": "x", "kind": "ragged", "us": {"TRITON": 10.0, "FlashInfer": 25.0}}
    cell["of_ceiling"] = {"TRITON": 1.0, "FlashInfer": 0.4}
    result = tmp_path / "results.json"
    result.write_text(json.dumps({"cells": [cell], "device": "a GPU", "date": "2026-01-01"}))
    monkeypatch.setattr(plots, "RESULTS", result)
    drawn = plots.images()
    assert set(drawn) == {"serving-ragged-light.svg", "serving-ragged-dark.svg"}
    marks, ticks = marks_of(drawn["serving-ragged-dark.svg"]), ticks_of(drawn["serving-ragged-dark.svg"])
    assert marks == {
        "TRITON | x | 1": pytest.approx(ticks["100%"]),
        "FlashInfer | x | 0.4": pytest.approx(ticks["40%"]),
    }
    [row] = plots.rows(json.loads(result.read_text()), plots.PICTURES[0])
    assert "| x | 10.0 | 100% | 25.0 |" in plots.table([row])
