"""benchmarks/mla.py runs without a GPU, as far as it can."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "mla.py"


def test_the_smoke_test_checks_each_of_its_cells() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--smoke"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "2 x 256, 16 heads",
        "1 x 128, 20 heads",
        "3 x 128, 4 heads, 4 queries",
    ]
    assert all(line.endswith(", right") for line in lines)
