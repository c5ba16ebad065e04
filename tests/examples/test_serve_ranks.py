"""The engine on several processes: outputs are those of one process, and arguments that do not fit are refused."""

from __future__ import annotations

import os
import socket
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
        ("deepseek-v3", 2, 1),
        pytest.param("deepseek-v2-lite", 2, 2, marks=pytest.mark.rare),
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
    done = run(3, "--tensor-parallel", "3", "--model", str(path), "--scale", "tiny")
    assert done.returncode != 0
    assert "3 ranks cannot split 2 heads of latents; share tokens by --context-parallel" in done.stderr


@pytest.mark.slow
def test_another_number_of_processes_is_refused() -> None:
    script = ROOT / "examples/engine/serve.py"
    done = subprocess.run(
        [sys.executable, str(script), "--context-parallel", "2"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "needs 2 processes, not 1: torchrun --nproc-per-node 2" in done.stderr


LEAVES = """
import contextlib, os, runpy, signal, sys
from attnplug.runtime import RankWatch

step, steps, name = RankWatch.step, [], sys.argv[1]

@contextlib.contextmanager
def leaving(self, digest=""):
    steps.append(digest)
    with step(self, digest):
        if len(steps) == 3:
            os.kill(os.getpid(), getattr(signal, name))
        yield

RankWatch.step = leaving
sys.argv = sys.argv[2:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs serve.py, and sends itself a signal in its third step as a rank."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal", "timeout", "what"),
    [("SIGKILL", 60, "has died: its connection is closed"), ("SIGSTOP", 10, "did not answer within 10 s")],
)
def test_a_rank_that_is_lost_ends_the_others(signal: str, timeout: int, what: str) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    launch = [str(ROOT / "examples/engine/serve.py"), "--context-parallel", "2", "--requests", "3"]
    launch += ["--max-tokens", "4", "--timeout", str(timeout)]
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    starts = [launch, ["-c", LEAVES, signal, *launch]]
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, arguments in enumerate(starts)
    ]
    try:
        printed, problem = ranks[0].communicate(timeout=200)
        # The lost rank has said nothing, so its signal ended it and no error did.
        ranks[1].kill()
        assert ranks[1].communicate() == ("", "")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[0].returncode == 1, problem
    assert f"serve.py: rank 1 of 2 {what}; step 3 has no result on rank 0" in problem
    # The run of one process is complete, and nothing of the one that lost a rank is printed.
    assert "one process:" in printed
    assert "constrained:" not in printed
    assert "finished" not in printed
