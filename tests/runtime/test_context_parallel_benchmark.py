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
    assert "ragged: error" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["ranks"], found["interleave"]) == (2, 4)
    assert [cell["cell"] for cell in found["cells"]] == ["3 x 100", "ragged"]
    assert all(cell["error"] < 1e-5 for cell in found["cells"])
    assert found["capacity"] >= 1.95
