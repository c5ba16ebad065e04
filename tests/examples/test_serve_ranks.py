"""The engine on several processes: outputs are those of one process, and arguments that do not fit are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from forked_ranks import start

ROOT = Path(__file__).parents[2]


SERVE = str(ROOT / "examples/engine/serve.py")


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
def test_ranks_draw_the_tokens_of_one_process(model: str, heads: int, tokens: int, tmp_path: Path) -> None:
    sizes = ["--tensor-parallel", str(heads), "--context-parallel", str(tokens)]
    path = ROOT / f"examples/models/{model}.json"
    drafts = ["--draft-tokens", "3", "--interleave", "4"]
    few = ["--requests", "5", "--max-tokens", "6"]
    arguments = [SERVE, *few, *sizes, "--model", str(path), "--scale", "tiny", *drafts]
    ranks = start([arguments] * (heads * tokens), tmp_path)
    try:
        first, *others = [rank.wait(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [each.code for each in (first, *others)] == [0] * len(ranks), (first, others)
    printed = first.printed
    assert printed.count("outputs equal: yes") == 1
    assert [each.printed for each in others if each.printed] == []
    if tokens > 1:
        assert f"{tokens} ranks share the tokens of" in " ".join(printed.split())


@pytest.mark.slow
def test_heads_that_ranks_cannot_split_are_refused(tmp_path: Path) -> None:
    path = ROOT / "examples/models/deepseek-v2-lite.json"
    arguments = [SERVE, "--tensor-parallel", "3", "--model", str(path), "--scale", "tiny"]
    for rank in start([arguments] * 3, tmp_path):
        code, _, problem = rank.wait(timeout=120)
        assert code != 0
        assert "3 ranks cannot split 2 heads of latents; share tokens by --context-parallel" in problem


@pytest.mark.slow
def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    (alone,) = start([[SERVE, "--context-parallel", "2"]], tmp_path)
    code, _, problem = alone.wait(timeout=60)
    assert code == 2
    assert "needs 2 processes, not 1: torchrun --nproc-per-node 2" in problem


LEAVES = """
import contextlib, os, runpy, signal, sys
from attnplug.runtime import RankWatch

step, steps, name = RankWatch.step, [], sys.argv.pop(1)

@contextlib.contextmanager
def leaving(self, digest=""):
    steps.append(digest)
    with step(self, digest):
        if len(steps) == 3:
            os.kill(os.getpid(), getattr(signal, name))
        yield

RankWatch.step = leaving
sys.argv.pop(0)
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs serve.py, and sends itself a signal in its third step as a rank."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal", "timeout", "what"),
    [("SIGKILL", 60, "has died: its connection is closed"), ("SIGSTOP", 10, "did not answer within 10 s")],
)
def test_a_rank_that_is_lost_ends_the_others(signal: str, timeout: int, what: str, tmp_path: Path) -> None:
    launch = [SERVE, "--context-parallel", "2", "--requests", "3", "--max-tokens", "4"]
    launch += ["--timeout", str(timeout)]
    leaves = tmp_path / "leaves.py"
    leaves.write_text(LEAVES)
    ranks = start([launch, [str(leaves), signal, *launch]], tmp_path)
    try:
        code, printed, problem = ranks[0].wait(timeout=200)
    finally:
        for rank in ranks:
            rank.kill()
    # The lost rank has said nothing, so its signal ended it and no error did.
    assert ranks[1].wait(timeout=0)[1:] == ("", "")
    assert code == 1, problem
    assert f"serve.py: rank 1 of 2 {what}; step 3 has no result on rank 0" in problem
    # The run of one process is complete, and nothing of the one that lost a rank is printed.
    assert "one process:" in printed
    assert "constrained:" not in printed
    assert "finished" not in printed
