"""The benchmark of context parallelism, on two processes of the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "context_parallel.py"


@pytest.mark.slow
def test_the_smoke_run_compares_each_cell_with_one_rank(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--smoke", "--interleave", "4", "--json", str(tmp_path / "found.json")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all within their limits"
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["ranks"], found["interleave"], found["failed"]) == (2, 4, [])
    assert [each["name"] for each in found["models"]] == ["llama", "gemma", "latents"]
    assert [each["name"] for each in found["cells"]] == ["3 x 100", "ragged", "prompt of 48", "40 after 60"]
    for each in (*found["models"], *found["cells"]):
        assert 0 < each["error"] < 1e-5
    assert all(each["deterministic"] for each in found["models"])
    [capacity] = found["capacity"]
    assert capacity["ratio"] >= 1.95
    assert capacity["one_bytes"] == capacity["ranks_bytes"]
