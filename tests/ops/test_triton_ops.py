"""On a GPU, operations look their kernels up by the name of a module: each name and each function is there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnplug.ops
from attnplug.ops.triton import triton_ops

pytest.importorskip("triton")


def lookups() -> Iterator[tuple[str, str]]:
    """The module and the function of each look-up in `attnplug.ops`."""
    for path in sorted(Path(attnplug.ops.__file__).parent.glob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(function, ast.FunctionDef):
                continue
            nodes = list(ast.walk(function))
            modules = {
                node.args[0].value
                for node in nodes
                if isinstance(node, ast.Call)
                and ast.unparse(node.func) == "triton_ops"
                and isinstance(node.args[0], ast.Constant)
            }
            used = {
                node.attr
                for node in nodes
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "kernels"
            }
            assert bool(modules) == bool(used)
            yield from ((str(module), name) for module in modules for name in used)


LOOKUPS = sorted(lookups())


def test_all_look_ups_are_found() -> None:
    assert len(LOOKUPS) == 9


@pytest.mark.parametrize(("module", "name"), LOOKUPS)
def test_the_kernel_is_there(module: str, name: str) -> None:
    assert callable(getattr(triton_ops(module), name))
