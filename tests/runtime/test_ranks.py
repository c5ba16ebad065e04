"""Groups of two and three processes on gloo: each runs all cases of `rank_cases`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rank_cases import cases

_WORKER = Path(__file__).with_name("rank_worker.py")


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_that_share_tokens_do_what_one_rank_does(size: int, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", _WORKER, str(rank), str(size), tmp_path], stderr=subprocess.PIPE
        )
        for rank in range(size)
    ]
    printed = [rank.communicate(timeout=300)[1].decode() for rank in ranks]
    for result in map(Path.read_text, tmp_path.glob("*.json")):
        assert json.loads(result)["failed"] == {}
    assert [rank.returncode for rank in ranks] == [0] * (size - 1) + [3], "\n".join(printed)
    for rank in range(size - 1):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result["failed"] == {}
        assert result["ran"] == [*(name for name, _ in cases(size)), "a lost rank"]
