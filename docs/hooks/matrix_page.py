"""Adds the page of the whole matrix and the page "Which backend for my model?" when the site is built."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from attnplug.matrix import Matrix
from attnplug.matrix.html import render_html
from attnplug.matrix.model_page import model_data
from attnplug.registry import Registry

ADDRESS = "reference/matrix.html"
MODELS = "which-backend.html"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """The files of the site and the two pages, so that links to them are checked as all others."""
    for address, text in pages().items():
        files.append(File.generated(config, address, content=text))
    return files


def pages() -> dict[str, str]:
    """Both pages by their addresses; each has links to the other and to the site."""
    home = "attnplug documentation"
    matrix = render_html(
        _generator().docs_matrix(),
        links={home: "../index.html", "Which backend for my model?": f"../{MODELS}"},
    )
    models = render_html(
        Matrix(()),
        models=model_data(Registry(), with_pasted=True),
        title="Which backend for my model?",
        links={home: "index.html", "Compatibility matrix": ADDRESS},
    )
    return {ADDRESS: matrix, MODELS: models}


def _generator() -> ModuleType:
    """docs/matrix.py, imported by its path: it belongs to no package."""
    spec = importlib.util.spec_from_file_location("matrix_of_docs", Path(__file__).parents[1] / "matrix.py")
    if spec is None or spec.loader is None:
        raise ImportError("docs/matrix.py is not there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
