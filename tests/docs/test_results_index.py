"""The index of measured figures names each file of its folder, and pages that are there."""

from __future__ import annotations

import re

from fences import ROOT

FOLDER = ROOT / "benchmarks" / "results"
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")


def test_each_file_is_named_once() -> None:
    first_columns = " ".join(line.split("|")[1] for line in INDEX.splitlines() if line.startswith("| `"))
    named = re.findall(r"`([^`]+)`", first_columns)
    assert sorted(named) == sorted(path.name for path in FOLDER.iterdir() if path.name != "README.md")


def test_each_page_and_plot_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)", INDEX):
        assert (FOLDER / target).is_file(), target
    for plot in re.findall(r"`([^`]+\.(?:svg|png))`", INDEX):
        assert list((ROOT / "docs" / "assets").glob(plot)), plot
