"""The index of measured figures names each file of its folder, and pages that are there."""

from __future__ import annotations

import fnmatch
import re

from fences import ROOT
from scripts import load_script

FOLDER = ROOT / "benchmarks" / "results"
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")


def test_each_file_is_named_once() -> None:
    first_columns = " ".join(line.split("|")[1] for line in INDEX.splitlines() if line.startswith("| `"))
    named = re.findall(r"`([^`]+)`", first_columns)
    assert sorted(named) == sorted(path.name for path in FOLDER.iterdir() if path.name != "README.md")


def test_each_page_and_plot_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)", INDEX):
        assert (FOLDER / target).is_file(), target
    # The site draws the plots in SVG when it is built.
    kept = [path.name for path in (ROOT / "docs" / "assets").iterdir()]
    drawn = [
        each
        for name in ("peer_plots", "serving_plots")
        for each in load_script(ROOT / f"docs/{name}.py").images()
    ]
    for plot in re.findall(r"`([^`]+\.(?:svg|png))`", INDEX):
        assert fnmatch.filter([*kept, *drawn], plot), plot
