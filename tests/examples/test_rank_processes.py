"""rank_processes.py starts a script once for each rank, and ends it where one of them fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rank_processes

SCRIPT = """
import json, os, sys, time
import choice_run, rank_processes

settings = json.load(sys.stdin)
with rank_processes.started(settings):
    folder, rank = sys.argv[1], rank_processes.rank()
    place = [os.environ.get(name) for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "NCCL_NVLS_ENABLE")]
    open(f"{folder}/{rank}.part", "w").write(json.dumps([settings["model"], *place]))
    os.replace(f"{folder}/{rank}.part", f"{folder}/{rank}.json")
    if settings.get("fails") == rank:
        raise ValueError("no memory")
    while settings.get("fails") or not all(os.path.exists(f"{folder}/{each}.json") for each in range(settings["ranks"])):
        time.sleep(0.02)
    choice_run.say("ended")
    choice_run.tell({"layers": []})
    time.sleep(60 * rank)
"""


def run(folder: Path, **settings: object) -> subprocess.CompletedProcess[str]:
    (folder / "some_run.py").write_text(SCRIPT)
    path = os.pathsep.join((str(Path(rank_processes.__file__).parent), os.environ.get("PYTHONPATH", "")))
    given = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, str(folder / "some_run.py"), str(folder)]
    text = json.dumps({"model": "m", **settings})
    return subprocess.run(
        command, input=text, env=given, capture_output=True, text=True, check=False, timeout=50
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_each_rank_runs_the_script_on_the_settings_and_the_first_prints(tmp_path: Path, ranks: int) -> None:
    begin = time.monotonic()
    done = run(tmp_path, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 'result of the choice: {"layers": []}\n'
    assert done.stderr.count("ended") == 1
    assert time.monotonic() - begin < 50, "other ranks end with the first"
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    if ranks == 1:
        assert found == [
            ["m", *map(os.environ.get, ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "NCCL_NVLS_ENABLE"))]
        ]
    else:
        [port] = {each[3] for each in found}
        assert found == [["m", str(rank), "3", port, "0"] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_another_launcher_gave_is_not_one_of_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "8")
    done = run(tmp_path, ranks=ranks)
    assert done.stdout == 'result of the choice: {"layers": []}\n'
    assert {each.name for each in tmp_path.glob("*.json")} == {f"{rank}.json" for rank in range(ranks)}


# The output ends with the last process that has it.
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_fails_ends_all(tmp_path: Path, ranks: int) -> None:
    done = run(tmp_path, ranks=ranks, fails=1)
    assert done.returncode == 1
    assert "ValueError: no memory" in done.stderr
    assert done.stdout == ""
