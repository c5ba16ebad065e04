"""What the interpreter cannot tell: the kernels compile for real GPUs, and move 16 bytes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
# The compilation of all kernels for three targets, which changes with the kernels or with Triton alone.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def instructions(tmp_path_factory) -> dict[str, dict[str, int]]:
    """The memory instructions of each kernel, by target and case."""
    environment = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")))
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("compile_kernels.py")
    child = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.mark.parametrize("target", ["sm80", "sm90", "gfx942"])
def test_every_kernel_compiles(instructions, target):
    cases = [case for case in instructions if case.startswith(target)]
    assert len(cases) == 12
    assert all(instructions[case] for case in cases)


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_keys_and_values_move_in_pieces_of_16_bytes(instructions, target):
    writes = {case: found for case, found in instructions.items() if case.startswith(f"{target} write")}
    assert len(writes) == 5
    for case, found in writes.items():
        slots = found.pop("ld.global.b64")
        stores = 4 if "float8" in case else 8
        assert slots <= 4
        assert found == {"ld.global.v4.b32": 8, "st.global.v4.b32": stores}, case


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_partials_are_read_in_pieces_of_16_bytes(instructions, target):
    found = instructions[f"{target} merge"]
    assert found["ld.global.v4.b32"] == 3
    assert found["st.global.v4.b32"] == 1


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_keys_are_gathered_in_pieces_of_16_bytes(instructions, target):
    found = instructions[f"{target} gathered"]
    assert found["ld.global.v4.b32"] == 8
    assert found["st.global.v4.b32"] == 8


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_partial_rows_are_read_in_pieces_of_16_bytes(instructions, target):
    found = instructions[f"{target} merge by rows"]
    assert found["ld.global.v4.b32"] == 1
    assert found["st.global.v4.b32"] == 1
