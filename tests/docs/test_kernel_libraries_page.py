"""The page of kernel libraries is what the table in the code makes it."""

from __future__ import annotations

import importlib.util

from fences import DOCS


def test_the_page_is_the_one_that_its_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("kernel_libraries_page", DOCS / "kernel_libraries.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.page(), "run: python docs/kernel_libraries.py"
