"""The plots against the best peer are drawn from the measured results, and say what these say."""

from __future__ import annotations

import json
import re
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest
from fences import ROOT
from scripts import load_script


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    return load_script(ROOT / "docs" / "peer_plots.py")


def test_what_is_kept_is_what_the_script_writes(plots: ModuleType) -> None:
    for path, content in plots.files(json.loads(plots.RESULTS.read_text()), plots.PAGE.read_text()).items():
        assert path.read_text() == content, "run: python docs/peer_plots.py"


def test_each_cell_of_these_kinds_has_a_line_in_one_plot(plots: ModuleType) -> None:
    result = json.loads(plots.RESULTS.read_text())
    drawn = [row for picture in plots.PICTURES for row in plots.rows(result, picture)]
    kinds = {kind for picture in plots.PICTURES for kind in picture.kinds}
    assert len(drawn) == sum(cell["kind"] in kinds for cell in result["cells"]) > 20


def test_marks_stand_where_the_figures_are(plots: ModuleType) -> None:
    picture = plots.Picture("made-up", "Made up", ("decode",))
    cell = {
        "cell": "x",
        "kind": "decode",
        "heads": [8, 1, 64],
        "us": {"FlashInfer": 10.0, "FlashAttention 4": 20.0, "TRITON": 5.0, "FLASH_ATTN_4+TRITON": 20.0},
    }
    [row] = plots.rows({"cells": [cell]}, picture)
    assert (row.peer, row.speed("TRITON"), row.speed("FLASH_ATTN_4+TRITON")) == ("FlashInfer", 2.0, 0.5)
    drawn = plots.svg(picture, [row], "a GPU", "2026-01-01", "light")
    root = ET.fromstring(drawn)
    ticks = {
        text.text: float(text.get("x", 0))
        for text in root.iter("{http://www.w3.org/2000/svg}text")
        if re.fullmatch(r"[\d.]+x", text.text or "")
    }
    [circle] = [each for each in root.iter("{http://www.w3.org/2000/svg}circle") if len(each)]
    assert float(circle.get("cx", 0)) == ticks["2x"]
    assert ticks["0.5x"] < ticks["1x"] < ticks["2x"]
