"""The benchmark of real batches: its small cells are right on a CPU, and its goals are ratios of one run."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_backends import backend, offered, with_impl

from attnplug.backends.torch_native import TorchBackend

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("attention"), importlib.import_module("serving")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="its small cells are for the interpreter")
def test_small_cells_are_right_with_an_option_of_a_backend(modules, capsys):
    attention, _ = modules

    @dataclasses.dataclass(frozen=True)
    class Options:
        keys: int = 64

    asked = []

    class Tiled(TorchBackend.get_impl_cls()):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            asked.append(self.options)

    backends = "TRITON,TILED.keys=32"
    with offered(backend("TILED", Options=Options, **with_impl(Tiled))):
        arguments = ["--suite", "serving", "--smoke", "--kinds", "prefix", "--backends", backends]
        assert attention.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * 4
    assert sum("no cascade" in line for line in lines) == 6
    assert sum("TILED.keys=32" in line for line in lines) == 6
    assert asked == [Options(32)] * 6


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


@pytest.mark.parametrize(("window", "seen"), [(None, 2 + 3 + 4 + 1 + 2), (3, 2 + 3 + 3 + 1 + 2), (1, 5)])
def test_products_are_counted_with_the_keys_that_queries_see(window, seen, modules):
    _, serving = modules
    fields = {} if window is None else {"sliding_window": window}
    found = serving.Cell("x", "extend", (8, 2, 16), (3, 2), (4, 2), tuple(fields.items()))
    assert found.flops == 4 * 8 * 16 * seen


def cell(kind, name, **us):
    share = {each: 100 / value for each, value in us.items()}
    return {"kind": kind, "cell": name, "us": us, "of_ceiling": share, "kv_bytes": 3e8, "heads": (32, 8, 128)}


CELLS = [
    cell("ragged", "24/8, 37 of 100 to 20k", A=110.0, FlashInfer=220.0),
    cell("ragged", "28/4, 96 of 50 to 30k", A=160.0, FlashInfer=220.0),
    cell("speculative", "32/8, 64 x 8k, 1 tokens", A=100.0),
    cell("speculative", "32/8, 64 x 8k, 8 tokens", A=120.0, FlashInfer=100.0),
    cell("speculative", "32/8, 64 x 8k, 16 tokens", A=100.0, FlashInfer=100.0),
    cell("single", "32/8, 1 x 1k", A=9.0),
    cell("prefix", "32/8, 64 share 16k, 1k each", **{"A": 10.0, "A, no cascade": 50.0}),
    cell("extend", "512 more of 32k, 1", **{"A": 10.0, "FlashAttention 4": 7.9}),
    cell(
        "prefill", "64 of 128", **{"A": 10.0, "FlashAttention 4": 20.0, "FlashInfer": 9.5, "cuDNN SDPA": 1.0}
    ),
]


def test_goals_are_ratios_within_a_run(modules):
    _, serving = modules
    goals = {
        goal["name"]: goal["met"] for goal in serving.judge_serving(CELLS, "A") if goal["met"] is not None
    }
    assert goals == {
        "A: ragged of >= 256 MB against copy, geometric mean": False,
        "A: the least (28/4, 96 of 50 to 30k)": False,
        "A: ragged against the best peer, geometric mean": True,
        "A: 32/8, 64 x 8k, 8 tokens, against one token": False,
        "A: 32/8, 64 x 8k, 8 tokens, against the best peer": False,
        "A: 32/8, 64 x 8k, 16 tokens, against the best peer": True,
        "A: 32/8, 1 x 1k, us": False,
        "A: 32/8, 64 share 16k, 1k each, against no cascade": True,
        "A: 512 more of 32k, 1, against FlashAttention 4": False,
        "A: 64 of 128, against the best of FlashInfer and FlashAttention 4": True,
    }


def test_goals_without_figures_are_named_as_not_measured(modules):
    attention, serving = modules
    goals = serving.judge_serving([], "A")
    assert len(goals) == len(serving.judge_serving(CELLS, "A"))
    assert all(goal["met"] is None and "not measured" in attention.goal_in_words(goal) for goal in goals)


def test_calls_add_up_in_one_file(modules):
    attention, _ = modules
    first = attention.with_part([], [{**each, "date": "1"} for each in CELLS[2:]])
    again = attention.with_part(first, [{**each, "date": "2"} for each in CELLS[:3]])
    assert [each["cell"] for each in again] == [each["cell"] for each in CELLS]
    assert [each["date"] for each in again] == ["2"] * 3 + ["1"] * (len(CELLS) - 3)
