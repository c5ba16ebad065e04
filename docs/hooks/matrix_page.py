"""Puts the page of the whole matrix beside the page that links to it, made when the site is built."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from attnplug.matrix.html import render_html

ADDRESS = "reference/matrix.html"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """The files of the site and the page, so that links to it are checked as all others."""
    files.append(File.generated(config, ADDRESS, content=render_html(_generator().docs_matrix())))
    return files


def _generator() -> ModuleType:
    """docs/matrix.py, imported by its path: it belongs to no package."""
    spec = importlib.util.spec_from_file_location("matrix_of_docs", Path(__file__).parents[1] / "matrix.py")
    if spec is None or spec.loader is None:
        raise ImportError("docs/matrix.py is not there")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
