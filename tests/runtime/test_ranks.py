"""Groups of two and three processes on gloo: each runs all cases of `rank_cases`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rank_cases import cases

_WORKER = Path(__file__).with_name("rank_worker.py")


_OF_TWO = ("readers with all rows split", "windows in graphs", "a plan that differs", "a rank that raises")
"""Cases of two that a plain run has."""
_OF_THREE = (
    *(f"combine {backend} scatter_heads=True torch.float32" for backend in ("ag_rs", "a2a")),
    *("sinks interleave=4", "latents interleave=4"),
    *_OF_TWO,
)
"""Cases in which three ranks differ from two: no power of two, two others to hear from, and a majority."""


def run(size: int, folder: Path, names: Sequence[str] = ()) -> None:
    """Run the cases of these names, or all, on `size` processes, of which the last one is then lost."""
    command = [sys.executable, "-W", "error", _WORKER, str(size), folder, *names]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, env=os.environ | paths
    )
    for result in map(Path.read_text, folder.glob("*.json")):
        assert json.loads(result)["failed"] == {}
    assert done.stdout == f"{[0] * (size - 1) + [3]}\n", done.stderr
    expected = [name for name, _ in cases(size) if not names or name in names]
    assert len(expected) == len(names) or not names
    for rank in range(size - 1):
        result = json.loads((folder / f"{rank}.json").read_text())
        assert result["failed"] == {}
        assert result["ran"] == [*expected, "a lost rank"]


def test_two_ranks_that_share_tokens_do_what_one_rank_does_in_some_cases(tmp_path: Path) -> None:
    run(2, tmp_path, _OF_TWO)


@pytest.mark.slow
def test_two_ranks_that_share_tokens_do_what_one_rank_does(tmp_path: Path) -> None:
    run(2, tmp_path)


@pytest.mark.slow
def test_three_ranks_share_tokens_and_name_the_one_that_is_lost(tmp_path: Path) -> None:
    run(3, tmp_path, _OF_THREE)


# The cases of two ranks again, of which CI has those where three differ.
@pytest.mark.slow
@pytest.mark.rare
def test_three_ranks_that_share_tokens_do_what_one_rank_does(tmp_path: Path) -> None:
    run(3, tmp_path)
