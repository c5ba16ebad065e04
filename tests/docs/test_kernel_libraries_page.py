"""The page of kernel libraries is what the table in the code makes it."""

from __future__ import annotations

from fences import DOCS
from scripts import load_script


def test_the_page_is_the_one_that_its_script_writes() -> None:
    script = load_script(DOCS / "kernel_libraries.py")
    assert script.PAGE.read_text() == script.page(), "run: python docs/kernel_libraries.py"
