"""Every name that authors of backends are promised is where the reference says, with the words it says."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
ROWS = re.findall(
    r"^\| `(\w+)` \| `([\w.]+)` \| (.+) \|$", (DOCS / "reference/batch-and-kv-cache.md").read_text(), re.M
)


@pytest.mark.parametrize(("name", "module", "line"), ROWS, ids=[name for name, _, _ in ROWS])
def test_a_name_is_importable_from_where_the_table_says(name: str, module: str, line: str) -> None:
    value = getattr(importlib.import_module(module), name)
    assert value.__doc__
    assert line


def test_the_page_is_what_the_docstrings_say() -> None:
    spec = importlib.util.spec_from_file_location("attnplug_docs_tables", DOCS / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert (DOCS / "reference/batch-and-kv-cache.md").read_text() == tables.page(), (
        "run python docs/tables.py"
    )
