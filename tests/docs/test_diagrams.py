"""The diagrams are those that the script draws, and their words are names of attnplug."""

from __future__ import annotations

from types import ModuleType

import pytest
from fences import DOCS, PAGES
from scripts import load_script

import attnplug
from attnplug.core.reasons import REASON_CODES
from attnplug.registry.selection.decision import Gate


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(DOCS / "diagrams.py")


def test_the_kept_files_are_those_that_the_script_writes(script: ModuleType) -> None:
    for path, content in script.pictures().items():
        assert path.read_text() == content, "run: python docs/diagrams.py"


def test_each_diagram_is_on_a_page_in_both_themes(script: ModuleType) -> None:
    pages = "".join((DOCS / page).read_text() for page in PAGES)
    for path in script.pictures():
        theme = path.stem.rpartition("-")[2]
        assert f"assets/{path.name}#only-{theme})" in pages


def test_the_gates_are_those_of_a_decision(script: ModuleType) -> None:
    assert [*script.GATES, "import"] == [str(gate) for gate in Gate]
    codes = [code for _, words in script.GATES.values() for code in words.split(", ") if code != "…"]
    assert set(codes) <= {*REASON_CODES}


def test_the_plugins_are_the_built_in_backends(script: ModuleType) -> None:
    built_in = {backend.family or name for name, backend in attnplug.list_backends().items()}
    assert {*script.PLUGINS} - {"yours"} == built_in
