"""The benchmark of the example engine with measured times: its figures, and models that fail."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tuned_engine.py"


def run(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [
        sys.executable,
        str(SCRIPT),
        "--smoke",
        "--rounds",
        "1",
        "--json",
        str(tmp_path / "found.json"),
    ]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    return done, json.loads((tmp_path / "found.json").read_text())


@pytest.mark.slow
def test_both_engines_serve_the_same_prompts_and_a_model_that_fails_costs_only_itself(tmp_path: Path) -> None:
    done, found = run(tmp_path, "--models", "no-such-model", "llama-3.1-8b")
    assert done.returncode == 1
    failed, fine = found["models"]
    assert "no-such-model" in failed["failed"]
    assert "failed" not in fine
    assert fine["same_backends"]
    assert fine["backends"] == {
        "default": ["2 on TORCH, by priority"],
        "tuned": ["2 on TORCH, by priority"],
    }
    for phase in ("prefill", "decode"):
        rates = fine[f"{phase}_tokens_s"]
        assert min(rates.values()) > 0
        # One round, whose ratio is that of the rates.
        assert fine["ratio"][phase] == pytest.approx(rates["tuned"] / rates["default"])
    assert "no-such-model, engine: failed: " in done.stdout
    assert "both are one engine in two runs" in done.stdout


def test_requests_that_end_with_errors_are_named() -> None:
    pytest.importorskip("transformers")
    import torch
    import tuned_engine

    class Broken:
        preemptions = 0
        running = waiting = ()
        pages = types.SimpleNamespace(_page_of={})

        def add(self, prompt: list[int], **_: Any) -> Any:
            return types.SimpleNamespace(output=[], error="the model gave NaN")

        def step(self) -> None:
            raise AssertionError("nothing is left to compute")

    with pytest.raises(RuntimeError, match="2 of 2 requests ended with: the model gave NaN"):
        tuned_engine.rates_of(Broken(), [[1], [2]], 4, torch.device("cpu"))
