"""`attnplug warm` lists and compiles the kernels that a model will launch on a GPU that is not here."""

from __future__ import annotations

import ctypes
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
    # What calls the driver is compiled too, and belongs to each kernel.
    (module,) = tmp_path.glob("*/cuda_utils*.so")
    try:
        ctypes.CDLL(str(module))
    except OSError as error:
        # It asks for the driver, and not for single functions that no library has.
        assert "libcuda.so.1: cannot open" in str(error)  # noqa: PT017
    module.unlink()
    code, said, _ = warm(*asked, *few, "--check")
    assert (code, said.splitlines()) == (1, lines)
    code, said, problem = warm(*asked, *few, "--jobs", "1", PATH=str(tmp_path), CC="")
    assert (code, problem) == (
        0,
        "no C compiler is here (CC, gcc, clang), so Triton compiles its launchers at the first launch\n",
    )
    assert said.endswith("warm, 0 cold\n")
    code, _, problem = warm(*asked, *few, "--jobs", "1", CC="false")
    assert (code, problem) == (
        0,
        "the C compiler fails, so Triton compiles its launchers at the first launch\n",
    )


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


def test_doctor_says_which_kernels_of_a_model_are_cold_and_the_command_that_compiles_them(monkeypatch):
    from attnplug.cli import cold_kernels
    from attnplug.cli.commands.warm import Kernels

    def found(forms, cold):
        monkeypatch.setattr(cold_kernels, "kernels_of", lambda *asked, **rest: Kernels(None, forms, cold, {}))
        monkeypatch.setattr(cold_kernels, "check_compiler", lambda command: None)
        return cold_kernels.state_of(Path("my model.json"), "a100")

    forms = ["one(a=1)", "one(a=2)", "two()", "three()", "four()"]
    state, words = found(forms, forms)
    assert state == "warning"
    assert words == (
        "5 of 5 kernels of TRITON are cold on sm80, so first requests wait for the compiler: one, two, three, ...; "
        "attnplug warm 'my model.json' --device a100 compiles them"
    )
    assert found(forms, forms[2:3])[1].startswith("1 of 5 kernels of TRITON is cold on sm80")
    assert found(forms, []) == ("ok", "all 5 kernels of TRITON are warm on sm80")
    assert found(None, [])[0] == "ok"


@pytest.mark.slow
def test_doctor_asks_about_a_model_in_a_process_of_its_own(tmp_path, monkeypatch):
    from attnplug.cli.cold_kernels import cold_kernels

    # Nothing is compiled for the interpreter.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    state, words = cold_kernels(MODEL, "a100", 120)
    assert state in ("ok", "warning")
    assert "kernels of TRITON" in words
    state, words = cold_kernels(MODEL, "sm75", 120)
    assert state == "lacking"
    assert "kernels are compiled ahead for sm80" in words
    assert cold_kernels(tmp_path / "none.json", "a100", 120)[0] == "lacking"
    assert cold_kernels(MODEL, "a100", 0.01) == ("failed", "took longer than 0.01 s")
