"""benchmarks/vllm_numbers.py: what it makes of the cases' outcomes, and a run where a source tree of vLLM is."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "vllm_numbers.py"))
SOURCES = [path for path in os.environ.get("ATTNPLUG_VLLM_SOURCE", "").split(os.pathsep) if path]
CASES = [
    {"case": "a", "outcome": "passed", "seconds": 0.5, "why": ""},
    {"case": "b", "outcome": "failed", "seconds": 0.5, "why": "not close\nby far"},
    {"case": "c", "outcome": "skipped", "seconds": 0.0, "why": "Skipped: refused: X has no fp8"},
    {"case": "d", "outcome": "skipped", "seconds": 0.0, "why": "Skipped: elsewhere"},
]


def written(folder: Path, cases: list[dict[str, Any]]) -> Path:
    (folder / "X.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    (folder / "X.log").write_text("why it ended\n")
    return folder


def test_refusals_and_failures_are_counted_apart(tmp_path: Path) -> None:
    found = SCRIPT["result"](written(tmp_path, CASES), "X", 1)
    printed = list(SCRIPT["lines"]("X", found, False))
    assert printed == [
        "X: 1 passed, 1 failed, 1 refused, 1 skipped",
        "  failed b: not close by far",
        "  1 times: X has no fp8",
        "  1 times: Skipped: elsewhere",
    ]


@pytest.mark.parametrize(("cases", "code"), [(CASES[:1], None), ([], 0), (CASES, 4)])
def test_a_run_that_did_not_end_is_no_success(cases: list[Any], code: int | None, tmp_path: Path) -> None:
    found = SCRIPT["result"](written(tmp_path, cases), "X", code)
    assert not found["ended"]
    assert found["log"] == ["why it ended"]
    assert len(found["cases"]) == len(cases), "it keeps what it has"


def test_an_interrupted_run_ends_all_its_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs: list[subprocess.Popen[bytes]] = []

    def start(*_: Any) -> subprocess.Popen[bytes]:
        runs.append(subprocess.Popen(["sleep", "60"], start_new_session=True))
        return runs[-1]

    def interrupted(*_: Any) -> None:
        raise SystemExit(143)

    monkeypatch.setitem(SCRIPT["main"].__globals__, "start", start)
    monkeypatch.setitem(SCRIPT["main"].__globals__, "wait", interrupted)
    with pytest.raises(SystemExit):
        SCRIPT["main"](["--source", str(tmp_path), "--backends", "TORCH", "TRITON"])
    assert [run.returncode for run in runs] == [-signal.SIGKILL, -signal.SIGKILL]


@pytest.mark.slow
@pytest.mark.skipif(not SOURCES, reason="no source tree of vLLM: ATTNPLUG_VLLM_SOURCE is not set")
def test_cases_run_and_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "numbers.json"
    asked = [
        "--source",
        SOURCES[0],
        "--backends",
        "TORCH",
        "FLASH_ATTN_2",
        "--jobs",
        "1",
        "--json",
        str(file),
    ]
    code = SCRIPT["main"]([*asked, "--select", "test_causal and small_decode", "--few"])
    found = json.loads(file.read_text())["backends"]
    assert (code, found["TORCH"]["failed"]) == (0, 0), capsys.readouterr().out
    assert found["TORCH"]["passed"] >= 3
    assert found["FLASH_ATTN_2"]["passed"] == 0
    assert "device type not supported" in capsys.readouterr().out
