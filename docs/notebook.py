"""Writes the notebook of the page "The first ten minutes": `python docs/notebook.py`."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guides/first-ten-minutes.md"
NOTEBOOK = ROOT / "examples/notebooks/first-ten-minutes.ipynb"

START = """# Paths are those of a clone's root.
from os import chdir
from pathlib import Path

chdir(next(folder for folder in [Path.cwd(), *Path.cwd().parents] if (folder / "examples/models").is_dir()))
"""
_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```\n", re.M | re.S)
_LINK = re.compile(r"\]\((?!https?:)([^)]+)\)")


def notebook(page: str) -> dict[str, Any]:
    """The page as a notebook: its commands and sessions are cells, with the output that the page shows."""
    cells: list[dict[str, Any]] = []
    end = 0
    for fence in _FENCE.finditer(page):
        language, options, code = fence.groups()
        if "data-not-run" in options:
            continue  # it stays part of the text
        cells += _words(page[end : fence.start()])
        cells += _code(language, code)
        end = fence.end()
    cells += _words(page[end:])
    cells.insert(1, _cell(START, ""))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _words(text: str) -> list[dict[str, Any]]:
    """A cell of the page's text; its links lead to the pages from the notebook's folder."""
    linked = _LINK.sub(lambda link: f"]({_from_notebook(link[1])})", text.strip())
    plain = re.sub(r"^```(\w+) \{[^\n]*", r"```\1", linked, flags=re.M)
    return [{"cell_type": "markdown", "metadata": {}, "source": _lines(plain)}] if plain else []


def _from_notebook(link: str) -> str:
    return f"../../docs/{link.removeprefix('../')}" if link.startswith("../") else f"../../docs/guides/{link}"


def _code(language: str, code: str) -> list[dict[str, Any]]:
    if language == "console":
        command, _, shown = code.removeprefix("$ ").partition("\n")
        return [_cell(f"!{command}", shown)]
    if language == "pycon":
        examples = doctest.DocTestParser().get_examples(code)
        return [_cell("".join(each.source for each in examples), "".join(each.want for each in examples))]
    return [_cell(code, "")]


def _cell(source: str, shown: str) -> dict[str, Any]:
    outputs = [{"name": "stdout", "output_type": "stream", "text": _lines(shown)}] if shown else []
    code = {"execution_count": None, "metadata": {}, "outputs": outputs, "source": _lines(source.rstrip())}
    return {"cell_type": "code", **code}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def text() -> str:
    """The file of the notebook."""
    return json.dumps(notebook(PAGE.read_text(encoding="utf-8")), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.parent.mkdir(exist_ok=True)
    NOTEBOOK.write_text(text(), encoding="utf-8")
