"""Puts plots and tables of measured results where a page has their marker; a marker without results gives nothing."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

DOCS = Path(__file__).parents[1]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """The files of the site and the plots of the results that are there."""
    from mkdocs.structure.files import File

    drawn = [module.images(report) for module, report in measured()]
    drawn += [_module(DOCS / f"{name}.py").images() for name in ("peer_plots", "serving_plots")]
    for name, text in (each for images in drawn for each in images.items()):
        files.append(File.generated(config, f"assets/{name}", content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its results in place of their markers."""
    sections = {module.MARKER: module.section(report) for module, report in measured()}
    for module in plots():
        markdown = markdown.replace(module.MARKER, sections.get(module.MARKER, ""))
    return markdown


def measured() -> list[tuple[ModuleType, dict[str, Any]]]:
    """The scripts whose results are there, with these."""
    return [(module, json.loads(module.RESULTS.read_text())) for module in plots() if module.RESULTS.exists()]


def plots() -> list[ModuleType]:
    """The scripts that draw results, imported by their paths: they belong to no package."""
    return [_module(DOCS / f"{name}.py") for name in ("context_parallel_plot", "regret_plot")]


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"plot_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not there")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their annotations up there
    if str(DOCS) not in sys.path:
        sys.path.append(str(DOCS))  # they import docs/plots.py
    spec.loader.exec_module(module)
    return module
