"""Kernels use only names that each supported version of Triton has, and no function that one of them lacks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import attnplug
from attnplug.ops.triton import launch

# The tests run with one version of Triton. TRITON's kernels serve 3.4 on, and its kernels in Gluon 3.6 on. These are
# the names by which 3.4 and 3.7, and Gluon of 3.6 and 3.7, differ.
OF_TRITON = {"async_task", "condition", "constexpr_function", "constexpr_type", "map_elementwise", "mul"}
OF_TRITON |= {"squeeze", "sub", "target_info", "to_tensor", "unsqueeze"}
LACKING = {"tl": OF_TRITON, "gl": {"barrier", "thread_barrier"}}
PLANTED = "key = tl.load(tl.core.to_tensor(k)).sub(tl.sum(x.sub))\ngl.barrier()\n"


def lacking_names(text: str) -> Iterator[str]:
    """The names of `tl` and `gl` in a module that some version lacks."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            module, *names = ast.unparse(node).split(".")
            if all(map(str.isidentifier, names)) and names[-1] in LACKING.get(module, ()):
                yield ".".join((module, *names))


def test_kernels_use_only_names_that_each_version_has() -> None:
    assert set(lacking_names(PLANTED)) == {"tl.core.to_tensor", "gl.barrier"}
    files = [file for file in Path(attnplug.__file__).parent.rglob("*.py") if "kernels" in file.parts]
    assert {"tiles.py", "kv_write.py", "specialized_prefill.py"} <= {file.name for file in files}
    found = {file.name: names for file in files if (names := list(lacking_names(file.read_text())))}
    assert found == {}


def constants_of_turns(text: str) -> Iterator[str]:
    """The names of constants that a loop gives a value in each of its turns."""
    for loop in ast.walk(ast.parse(text)):
        if isinstance(loop, ast.For | ast.While):
            for node in ast.walk(loop):
                if isinstance(node, ast.AnnAssign) and "constexpr" in ast.unparse(node.annotation):
                    yield ast.unparse(node.target)


def test_no_loop_gives_a_constant_several_values() -> None:
    """The interpreter takes it, and the compiler refuses the second turn."""
    planted = "for at in tl.static_range(8):\n    STEP: tl.constexpr = 1 << at\n"
    assert list(constants_of_turns(planted)) == ["STEP"]
    files = Path(attnplug.__file__).parent.rglob("*.py")
    found = {file.name: names for file in files if (names := list(constants_of_turns(file.read_text())))}
    assert found == {}


@pytest.mark.parametrize("version", ["3.4", "3.5 and later", "none"])
def test_kernels_overlap_if_the_compiler_takes_the_functions_for_it(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = {
        "3.4": {"gdc_wait": lambda _builder=None: None},
        "3.5 and later": {"gdc_wait": lambda _semantic=None: None},
        "none": {},
    }
    monkeypatch.setattr(launch, "cuda", SimpleNamespace(**functions[version]))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    overlap = launch.can_overlap.__wrapped__(torch.device("cuda"))
    assert overlap == (version == "3.5 and later")
