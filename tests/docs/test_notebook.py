"""The notebook has the blocks of its page, and each cell runs where the one before has ended."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fences import ROOT
from scripts import load_script
from workplace import readers_environment

NOTEBOOK = ROOT / "examples/notebooks/first-ten-minutes.ipynb"
CELLS = [
    "".join(cell["source"])
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]
SHELL = """
import subprocess, sys
def _shell(command):
    program, *arguments = command.split()
    subprocess.run([sys.executable, "-m", program, *arguments], check=True)
"""


def program(cells: list[str]) -> str:
    """The cells as one program, in which `!attnplug ...` starts a process."""
    return SHELL + "\n".join(f"_shell({cell[1:]!r})" if cell.startswith("!") else cell for cell in cells)


def test_the_notebook_is_the_one_of_its_page() -> None:
    script = load_script(ROOT / "docs/notebook.py")
    assert NOTEBOOK.read_text(encoding="utf-8") == script.text(), "run: python docs/notebook.py"


def test_the_links_of_the_notebook_lead_to_pages() -> None:
    script = load_script(ROOT / "docs/notebook.py")
    cells = script.notebook(script.PAGE.read_text())["cells"]
    links = [link for cell in cells for link in script._LINK.findall("".join(cell["source"]))]
    assert len(links) > 4
    for link in links:
        assert (NOTEBOOK.parent / link.partition("#")[0]).is_file(), link


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert len(CELLS) > 8
    assert any("attnplug.register" in cell for cell in CELLS)
    ast.parse(program(CELLS))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program(CELLS)],
        cwd=tmp_path,
        env=readers_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "attnplug-acme").is_dir()
