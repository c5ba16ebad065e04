"""The plots against the best peer are drawn from the measured results, and say what these say."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from drawn import marks_of, ticks_of
from fences import ROOT
from scripts import load_script


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    return load_script(ROOT / "docs" / "peer_plots.py")


def test_the_page_has_the_figures_of_the_results(plots: ModuleType) -> None:
    page = plots.PAGE.read_text()
    assert plots.filled(page) == page, "run: python docs/peer_plots.py"


def test_each_cell_of_these_kinds_has_a_line_in_one_plot(plots: ModuleType) -> None:
    result = json.loads(plots.RESULTS.read_text())
    drawn = [row for picture in plots.PICTURES for row in plots.rows(result, picture)]
    kinds = {kind for picture in plots.PICTURES for kind in picture.kinds}
    assert len(drawn) == sum(cell["kind"] in kinds for cell in result["cells"]) > 20


def test_marks_are_where_the_figures_are(
    plots: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = {
        "cell": "x",
        "kind": "decode",
        "heads": [8, 1, 64],
        "us": {"FlashInfer": 10.0, "FlashAttention 4": 20.0, "TRITON": 5.0, "FLASH_ATTN_4+TRITON": 20.0},
    }
    [row] = plots.rows({"cells": [cell]}, plots.PICTURES[0])
    assert (row.peer, row.speed("TRITON"), row.speed("FLASH_ATTN_4+TRITON")) == ("FlashInfer", 2.0, 0.5)
    result = tmp_path / "results.json"
    result.write_text(json.dumps({"cells": [cell], "device": "a GPU", "date": "2026-01-01"}))
    monkeypatch.setattr(plots, "RESULTS", result)
    monkeypatch.setattr(plots, "PICTURES", plots.PICTURES[:1])
    drawn = plots.images()["peers-decode-light.svg"]
    marks, ticks = marks_of(drawn), ticks_of(drawn)
    assert marks["attnplug, TRITON alone | x (8/1/64) | 2"] == pytest.approx(ticks["2x"])
    unit = ticks["2x"] - ticks["1x"]
    assert marks["attnplug, libraries installed | x (8/1/64) | 0.5"] == pytest.approx(ticks["1x"] - unit / 2)
    assert "a GPU, 2026-01-01" in drawn
