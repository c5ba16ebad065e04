"""What `benchmarks/compile_flashinfer.py` builds ahead is what is then run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def listed(*arguments: str) -> list[str]:
    command = [sys.executable, "benchmarks/compile_flashinfer.py", "--device", "sm90", "--list", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    first, *modules = done.stdout.splitlines()
    assert first == f"{len(modules)} modules on sm90"
    return [line.strip() for line in modules]


@pytest.mark.slow
def test_the_smoke_level_of_the_kit_needs_few_modules() -> None:
    modules = listed("--kit", "smoke")
    assert "fa2 for head size 64, float16 over float16" in modules
    assert "fa3 for head size 64, float16 over float16, window, sinks" in modules
    assert "fa2 for head size 64, float16 over float8_e4m3fn" in modules
    # A minute or more each on one processor. Eight keys of single features, and the kit's six compile keys, whose
    # plainest is among the eight. Keys of 16 bits have both templates.
    keys = {line.partition(" ")[2] for line in modules if "latents" not in line}
    assert len(keys) <= 8 + 5
    # The option says nothing of decodes over latents.
    others = [line for line in listed("--kit", "smoke", "--prefill", "fa2") if "latents" not in line]
    assert not any(line.startswith("fa3") for line in others)


def test_a_model_needs_a_module_for_each_template_and_kind_of_its_layers() -> None:
    pytest.importorskip("transformers")
    assert sorted(listed("examples/models/gpt-oss-20b.json")) == [
        "fa2 for head size 64, bfloat16 over bfloat16, sinks",
        "fa2 for head size 64, bfloat16 over bfloat16, window, sinks",
        "fa3 for head size 64, bfloat16 over bfloat16, sinks",
        "fa3 for head size 64, bfloat16 over bfloat16, window, sinks",
    ]
