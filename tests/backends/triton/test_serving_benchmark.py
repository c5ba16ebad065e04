"""The benchmark of real batches: its small cells are right on a CPU, and its goals are ratios of one run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("attention"), importlib.import_module("serving")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="its small cells are for the interpreter")
def test_small_cells_are_right_with_both_values_of_an_option(modules, capsys):
    attention, _ = modules
    backends = "TRITON,TRITON.decode_split=requests"
    assert attention.main(["--suite", "serving", "--smoke", "--kinds", "prefix", "--backends", backends]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * 4
    assert sum("no cascade" in line for line in lines) == 6
    assert sum("decode_split=requests" in line for line in lines) == 6


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.skipif(torch.cuda.is_available(), reason="its small cells are for the interpreter")
def test_small_cells_of_all_kinds_are_right(modules):
    attention, _ = modules
    assert attention.main(["--suite", "serving", "--smoke", "--backends", "TRITON"]) == 0


def test_every_kind_of_cell_has_a_small_one(modules):
    _, serving = modules
    kinds = {cell.kind for cell in serving.SERVING}
    assert kinds == {"ragged", "speculative", "single", "prefix", "extend", "prefill"}
    for cell in serving.SERVING:
        small = serving.small(cell)
        assert sum(small.seq_lens) < 300
        assert (small.kind, small.heads[2]) == (cell.kind, cell.heads[2])
        assert small.shared < min(small.seq_lens)
    assert len({cell.name for cell in serving.SERVING}) == len(serving.SERVING)


def test_goals_are_ratios_within_a_run(modules):
    _, serving = modules

    def cell(kind, name, **us):
        share = {each: 100 / value for each, value in us.items()}
        sizes = {"kv_bytes": 3e8, "heads": (32, 8, 128)}
        return {"kind": kind, "cell": name, "us": us, "of_ceiling": share, **sizes}

    cells = [
        cell("ragged", "one", A=110.0, peer=220.0),
        cell("ragged", "two", A=160.0, peer=220.0),
        cell("speculative", "x, 1 tokens", A=100.0),
        cell("speculative", "x, 8 tokens", A=120.0, peer=100.0),
        cell("speculative", "x, 16 tokens", A=100.0, peer=100.0),
        cell("prefix", "64 share 16k", **{"A": 10.0, "A, no cascade": 50.0}),
        cell("single", "32/8, 1 x 1k", A=9.0),
    ]
    goals = {goal["name"]: goal["met"] for goal in serving.judge_serving(cells, "A", {"peer"})}
    assert goals == {
        "A: ragged of >= 256 MB against copy, geometric mean": False,
        "A: the least (two)": False,
        "A: ragged against the best peer, geometric mean": True,
        "A: x, 8 tokens, against one token": False,
        "A: x, 8 tokens, against the best peer": False,
        "A: x, 16 tokens, against the best peer": True,
        "A: 64 share 16k, against no cascade": True,
        "A: 32/8, 1 x 1k, us": False,
    }
