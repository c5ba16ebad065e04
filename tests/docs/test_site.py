"""The site is whole: every public name, variable, code and group of checks stands in it, and no other."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from fences import DOCS, PAGES, ROOT

from attnplug.backends.torch_native import TorchBackend
from attnplug.cli import app as program
from attnplug.core import errors
from attnplug.core.reasons import REASON_CODES
from attnplug.testing.conformance import conformance_checks

PUBLIC = re.findall(r"^\| `(attnplug[\w.]*)` \|", (DOCS / "reference/index.md").read_text(), re.M)
SHOWN = [name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", (DOCS / page).read_text(), re.M)]


def value_of(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def rows(page: str) -> list[str]:
    """The first cells of a page's tables, without their heads."""
    lines = (DOCS / page).read_text().splitlines()
    cells = [line.split("|")[1].strip() for line in lines if line.startswith("| ")]
    return [cell for cell in cells if cell.startswith("`") or cell.isdigit()]


@pytest.mark.parametrize("name", SHOWN)
def test_the_reference_shows_only_names_that_are_there(name: str) -> None:
    assert value_of(name) is not None


def test_the_reference_shows_each_name_once() -> None:
    assert len(SHOWN) == len(set(SHOWN))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    # A name that a second module exports too stands under the first.
    shown = [value_of(name) for name in SHOWN]
    exported = importlib.import_module(module).__all__
    names = {f"{module}.{name}" for name in exported} - {*PUBLIC}
    assert [name for name in sorted(names) if not any(value_of(name) is each for each in shown)] == []


def test_only_public_modules_list_their_names() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in (ROOT / "attnplug").rglob("*.py")
    }
    listing = {
        name for name, source in modules.items() if re.search(r"^(__all__|.*, __all__) [+]?= ", source, re.M)
    }
    # attnplug.errors passes on the list of attnplug.core.errors.
    assert listing - {"attnplug.core.errors"} == {*PUBLIC} - {"attnplug.errors"}


def test_what_users_are_shown_imports_from_public_modules_only() -> None:
    """Pages, examples and the files of a new backend: the package itself may import from its internal modules."""
    shown = [ROOT / "README.md", *(DOCS / page for page in PAGES)]
    for folder in (ROOT / "examples", ROOT / "attnplug" / "templates"):
        shown += [path for path in folder.rglob("*") if path.suffix in (".py", ".tmpl")]
    imported = re.compile(r"^\W*(?:from|import) (attnplug(?:\.\w+)*)", re.M)
    found = {(path.name, name) for path in shown for name in imported.findall(path.read_text())}
    assert {"attnplug", "attnplug.core", "attnplug.ops.checks"} <= {name for _, name in found}
    assert sorted((where, name) for where, name in found if name not in PUBLIC) == []


def test_every_variable_is_on_its_page() -> None:
    source = "".join(path.read_text() for path in (ROOT / "attnplug").rglob("*.py"))
    read = set(re.findall(r'"(ATTNPLUG_[A-Z_]+)"', source)) - {"ATTNPLUG_API"}
    # The page has a table of the project's keys too, which tests of these read.
    named = {cell.strip("`") for cell in rows("reference/environment.md")}
    assert {name for name in named if name.startswith("ATTNPLUG_")} == read


def test_every_logger_is_on_its_page() -> None:
    source = "".join(path.read_text() for path in (ROOT / "attnplug").rglob("*.py"))
    loggers = set(re.findall(r'^_\w+ = logging\.getLogger\("([\w.]+)"\)$', source, re.MULTILINE))
    assert loggers == {cell.strip("`") for cell in rows("guides/logging.md")}
    # Without a name of its own, a logger is not below attnplug.
    assert source.count("_LOG = logging.getLogger(") + source.count("_log = logging.getLogger(") > len(
        loggers
    )


def test_every_exit_code_is_on_its_page() -> None:
    shown = {int(cell) for cell in rows("reference/exit-codes.md")}
    assert shown >= {0, program.FAILED, program.BAD_USAGE, program.NO_BACKEND}


def test_every_reason_code_is_on_its_page() -> None:
    cells = re.findall(r"`([\w.<>]+)`", " ".join(rows("concepts/reasons.md")))
    assert set(cells) == {"feature.<name>" if code == "feature" else code for code in REASON_CODES}


def test_the_tree_of_errors_is_the_one_of_the_docstring() -> None:
    assert errors.__doc__ is not None
    tree = re.findall(r"^([│├└─ ]*)(\w+Error)(?: \((\w+)\))? *(.*)$", errors.__doc__, re.MULTILINE)
    page = (DOCS / "reference/errors.md").read_text()
    shown = re.findall(r"^( *)- \[`(\w+)`\]\S+?(?:, also a `(\w+)`)?: (.*)$", page, re.MULTILINE)
    assert len(tree) == len(errors.__all__)
    assert [(len(indent), *rest) for indent, *rest in shown[1:]] == [
        (len(branch), *rest) for branch, *rest in tree[1:]
    ]


def test_every_group_of_checks_is_on_its_page() -> None:
    groups = {check.id.partition("/")[0] for check in conformance_checks(TorchBackend, device="cpu")}
    shown = {cell.strip("`") for cell in rows("concepts/conformance.md")}
    assert groups <= shown


def test_the_pages_are_those_of_the_menu() -> None:
    menu = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(menu) == PAGES


def test_the_commands_for_contributors_are_those_that_ci_runs() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ci = Path(ROOT, ".ci", "run").read_text() + (ROOT / "README.md").read_text()
    for line in block.splitlines():
        for command in line.partition("#")[0].split("&&"):
            assert command.strip() == "bash .ci/run" or command.strip() in ci, command


def test_the_files_where_tasks_begin_are_there() -> None:
    tasks = re.findall(r"^\| .+\. \| `([\w/]+\.py)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert len(tasks) == 10
    assert [path for path in tasks if not (ROOT / "attnplug" / path).is_file()] == []
