"""`attnplug warm` lists and compiles the kernels that a model will launch on a GPU that is not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

MODEL = Path(__file__).parents[2] / "examples" / "models" / "qwen3-8b.json"


def warm(*arguments: object, **variables: str) -> tuple[int, str, str]:
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | variables
    command = [sys.executable, "-m", "attnplug", "warm", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_what_a_model_will_launch_is_cold_until_it_is_compiled(tmp_path):
    asked = MODEL, "--device", "a100", "--cache", tmp_path
    few = "--max-num-batched-tokens", "1", "--max-num-seqs", "1"
    code, said, _ = warm(*asked, *few, "--check")
    lines = said.splitlines()
    assert code == 1
    assert any(line.startswith("cold: share_decode_kernel(") for line in lines)
    assert not any("prefill_kernel" in line for line in lines)
    code, said, problem = warm(*asked, *few, "--jobs", "2")
    assert (code, problem) == (0, "")
    assert f"into {tmp_path}" in said
    code, said, _ = warm(*asked, *few, "--check")
    assert code == 0
    assert said == f"{len(lines) - 1} kernels for sm80: {len(lines) - 1} warm, 0 cold\n"


@pytest.mark.slow
def test_layers_of_other_backends_and_other_devices_are_named(tmp_path):
    code, said, problem = warm(MODEL, "--device", "a100", "--backend", "TORCH", "--cache", tmp_path)
    assert (code, said) == (0, "")
    assert "36 layers on TORCH, whose kernels are not compiled ahead" in problem
    code, _, problem = warm(MODEL, "--device", "sm75")
    assert code == 2
    assert "kernels are compiled ahead for sm80" in problem
    code, _, problem = warm(MODEL, "--device", "sm90", TRITON_INTERPRET="1")
    assert code == 2
    assert "TRITON_INTERPRET" in problem
