"""The plots of real batches are drawn from the measured results, and mark the figures."""

from __future__ import annotations

import json
import re
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest
from fences import ROOT
from scripts import load_script

pytest.importorskip("torch")

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plots() -> ModuleType:
    return load_script(ROOT / "docs" / "serving_plots.py")


def test_what_is_kept_is_what_the_script_writes(plots: ModuleType) -> None:
    for path, content in plots.files(plots.PAGE.read_text()).items():
        assert path.read_text() == content, "run: python docs/serving_plots.py"


def test_each_cell_of_triton_is_in_one_plot(plots: ModuleType) -> None:
    result = json.loads(plots.RESULTS.read_text())
    drawn = [row for picture in plots.PICTURES for row in plots.rows(result, picture)]
    assert len(drawn) == sum(plots.OURS in cell["us"] for cell in result["cells"]) > 20


def test_marks_are_at_the_share_of_the_ceiling(plots: ModuleType) -> None:
    picture = plots.Picture("made-up", "Made up", ("ragged",), "a copy")
    row = plots.Row("ragged", "x", {"TRITON": 10.0, "FlashInfer": 25.0}, {"TRITON": 1.0, "FlashInfer": 0.4})
    root = ET.fromstring(plots.svg(picture, [row], "a GPU", "2026-01-01", "dark"))
    ticks = {
        text.text: float(text.get("x", 0))
        for text in root.iter(f"{SVG}text")
        if re.fullmatch(r"\d+%", text.text or "")
    }
    marks = {each[0].text: float(each.get("cx", 0)) for each in root.iter(f"{SVG}circle") if len(each)}
    assert marks == {"TRITON: 10.0 us, 100%": ticks["100%"], "FlashInfer: 25.0 us, 40%": ticks["40%"]}
    assert "| x | 10.0 | 100% | 25.0 |" in plots.table([row])
