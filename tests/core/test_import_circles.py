"""No module of attnplug imports itself by way of others, and no impl imports the backend that declares it."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnplug

ROOT = Path(attnplug.__file__).parent
MODULES = {
    ".".join(("attnplug", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def run_time_nodes(node: ast.AST, *, inside_functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, FUNCTIONS) and not inside_functions:
            continue
        yield child
        yield from run_time_nodes(child, inside_functions=inside_functions)


def imports_of(name: str, *, inside_functions: bool) -> set[str]:
    """The modules of attnplug that one imports at run time, in functions too where asked."""
    found: set[str] = set()
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for node in run_time_nodes(tree, inside_functions=inside_functions):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            children = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= children & MODULES.keys() or {str(node.module)}
    return (found & MODULES.keys()) - {name}


def defines_impl(path: Path) -> bool:
    text = path.read_text(encoding="utf-8")
    # This runs in each collection, and few modules have the word.
    tree = ast.parse(text if "Impl" in text else "")
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return any("Impl" in ast.unparse(base) for each in classes for base in each.bases)


IMPLS = [name for name, path in MODULES.items() if defines_impl(path)]


@pytest.mark.parametrize("inside_functions", [False, True])
def test_no_imports_go_in_a_circle(inside_functions: bool) -> None:
    graph = {name: imports_of(name, inside_functions=inside_functions) for name in MODULES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_the_impls_are_found() -> None:
    assert {name.split(".")[2] for name in IMPLS if name.startswith("attnplug.backends.")} == {
        "impl",
        "flash_attn",
        "flash_mla",
        "flashinfer",
        "torch_native",
        "triton",
    }


@pytest.mark.parametrize("name", IMPLS)
def test_an_impl_is_given_its_backend_and_does_not_import_it(name: str) -> None:
    backends = {each for each in imports_of(name, inside_functions=True) if declares_backend(each)}
    assert not backends


def declares_backend(name: str) -> bool:
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    # The contract itself, AttentionBackend, has no base of that name.
    return any(ast.unparse(base).endswith("Backend") for each in classes for base in each.bases)
