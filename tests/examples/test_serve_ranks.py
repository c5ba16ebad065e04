"""The engine on several processes: outputs are those of one process, and arguments that do not fit are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`serve.py` under torchrun with few requests."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    script = [*launch, str(ROOT / "examples/engine/serve.py"), "--requests", "5", "--max-tokens", "6"]
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run([*script, *arguments], capture_output=True, text=True, check=False, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "heads", "tokens"),
    [
        *[("llama-3.1-8b", 1, 2), ("deepseek-v2-lite", 1, 2), ("gpt-oss-20b", 2, 1)],
        pytest.param("gpt-oss-20b", 1, 2, marks=pytest.mark.rare),
        pytest.param("gemma-3-27b-text", 2, 2, marks=pytest.mark.rare),
    ],
)
def test_ranks_draw_the_tokens_of_one_process(model: str, heads: int, tokens: int) -> None:
    sizes = ["--tensor-parallel", str(heads), "--context-parallel", str(tokens)]
    path = ROOT / f"examples/models/{model}.json"
    drafts = ["--draft-tokens", "3", "--interleave", "4"]
    done = run(heads * tokens, *sizes, "--model", str(path), "--scale", "tiny", *drafts)
    assert done.returncode == 0, done.stderr
    assert "outputs equal: yes" in done.stdout
    # Other ranks print nothing.
    assert done.stdout.count("outputs equal") == 1
    if tokens > 1:
        assert f"{tokens} ranks share the tokens of" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_heads_that_ranks_cannot_split_are_refused() -> None:
    path = ROOT / "examples/models/deepseek-v2-lite.json"
    done = run(2, "--tensor-parallel", "2", "--model", str(path), "--scale", "tiny")
    assert done.returncode != 0
    assert (
        "2 ranks cannot split latents that all heads share; share tokens by --context-parallel" in done.stderr
    )


@pytest.mark.slow
def test_another_number_of_processes_is_refused() -> None:
    script = ROOT / "examples/engine/serve.py"
    done = subprocess.run(
        [sys.executable, str(script), "--context-parallel", "2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "needs 2 processes, not 1: torchrun --nproc-per-node 2" in done.stderr
