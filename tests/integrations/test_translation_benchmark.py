"""benchmarks/translation.py: the steps that it times, and that transformers' two forms of a step give the same pages."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import torch

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "translation.py"))


def test_block_tables_and_indices_give_the_same_step() -> None:
    made: dict[tuple[str, str], Any] = {(engine, step): call() for engine, step, call in SCRIPT["cases"](3)}
    tables, indices = (made["transformers", step] for step in ("block tables", "an index for each token"))
    theirs = made["vLLM", "each group of layers"]
    for common in (tables, indices):
        assert torch.equal(common.block_table_tensor, theirs.block_table_tensor)
        assert torch.equal(common.slot_mapping, theirs.slot_mapping)
        assert torch.equal(common.seq_lens, theirs.seq_lens)
        assert torch.equal(common.query_start_loc, theirs.query_start_loc)


def test_a_figure_is_cpu_time() -> None:
    assert SCRIPT["cpu_us"](lambda: sum(range(1000)), 3) > 1
