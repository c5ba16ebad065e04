"""The engine on several processes: outputs are those of one process, and arguments that do not fit are refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


SERVE = str(ROOT / "examples/engine/serve.py")


def torchrun(processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`serve.py` under torchrun."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run([*launch, SERVE, *arguments], capture_output=True, text=True, check=False)


def start(ranks: list[list[str]]) -> list[subprocess.Popen[str]]:
    """The processes that torchrun would start, each with the arguments of its own rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **group, "COLUMNS": "100", "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, arguments in enumerate(ranks)
    ]


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
    few = ["--requests", "5", "--max-tokens", "6"]
    ranks = start(
        [[SERVE, *few, *sizes, "--model", str(path), "--scale", "tiny", *drafts]] * (heads * tokens)
    )
    try:
        (printed, problem), *others = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), (problem, others)
    assert printed.count("outputs equal: yes") == 1
    assert [out for out, _ in others if out] == []
    if tokens > 1:
        assert f"{tokens} ranks share the tokens of" in " ".join(printed.split())


@pytest.mark.slow
def test_heads_that_ranks_cannot_split_are_refused() -> None:
    path = ROOT / "examples/models/deepseek-v2-lite.json"
    done = torchrun(3, "--tensor-parallel", "3", "--model", str(path), "--scale", "tiny")
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
    launch = [SERVE, "--context-parallel", "2", "--requests", "3", "--max-tokens", "4"]
    launch += ["--timeout", str(timeout)]
    ranks = start([launch, ["-c", LEAVES, signal, *launch]])
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
