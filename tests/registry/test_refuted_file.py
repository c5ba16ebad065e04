"""The file of what was refuted: what a run adds and takes away, several writers, and files that are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from evidence_runs import WHY, cell, run

from attnplug.core import Device
from attnplug.errors import MatrixFileError
from attnplug.registry.selection.evidence import evidence_path, forget, read_evidence, record

SINKS = cell("sinks", "decode")
LATER = "2026-11-22T18:00:00+00:00"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that this test keeps evidence in."""
    path = tmp_path / "evidence.json"
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(path))
    return path


def ids() -> list[str]:
    """The cells that are remembered, each with its backend."""
    evidence = read_evidence()
    assert evidence.read_error is None
    return sorted(
        f"{subject.backend} {each.id}" for subject, cells in evidence.cells.items() for each in cells
    )


# Where it is


def test_it_is_in_the_users_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert evidence_path() == tmp_path / "attnplug" / "refuted.json"
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", "")
    assert evidence_path() == tmp_path / "attnplug" / "refuted.json"


def test_tests_have_a_data_folder_of_their_own() -> None:
    assert "user-data" in evidence_path().parts
    assert not evidence_path().exists()


@pytest.mark.parametrize(
    ("named", "found"), [("e.json", "e.json"), ("here", "here/refuted.json"), ("new/", "new/refuted.json")]
)
def test_the_variable_names_a_file_or_a_folder(
    named: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("here").mkdir()
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", f"{tmp_path}/{named}")
    assert evidence_path() == tmp_path / found
    assert record(run("LIAR", SINKS)).path == tmp_path / found
    assert ids() == ["LIAR sinks/decode/d64/bfloat16/auto/b16/NHD"]


@pytest.mark.parametrize("named", ["~nobody-of-this-name/e.json", "/dev/null/e.json"])
def test_a_place_that_cannot_be_is_no_evidence(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", named)
    assert read_evidence().cells == {}


# What a run does to it


def test_everything_of_a_refuted_cell_is_read_back(kept: Path) -> None:
    about = {"device": "sm90", "device_name": "NVIDIA H200", "distribution": "liar", "version": "1.0"}
    record(run("LIAR", cell("fp8_kv", kv_cache_dtype="fp8", layout="HND"), **about))
    ((subject, (found,)),) = read_evidence().cells.items()
    assert (subject.backend, subject.distribution, subject.version) == ("LIAR", "liar", "1.0")
    assert subject.device == Device("cuda", (9, 0), "NVIDIA H200")
    assert dict(subject.versions) == run("LIAR")["versions"]
    assert found.id == "fp8_kv/mixed/d64/bfloat16/fp8/b16/HND"
    assert (found.date, found.why) == ("2026-11-21T18:00:00+00:00", (WHY,))


def test_only_refuted_cells_are_remembered(kept: Path) -> None:
    others = [cell(phase="decode", status=each) for each in ("declared", "refused", "verified", "not run")]
    done = record(run("LIAR", SINKS, *others))
    assert (done.refuted, done.cleared) == (1, 0)
    assert ids() == ["LIAR sinks/decode/d64/bfloat16/auto/b16/NHD"]


def test_nothing_is_made_where_nothing_was_refuted(kept: Path) -> None:
    done = record(run("LIAR", cell(status="verified")))
    assert (done.refuted, done.cleared) == (0, 0)
    assert list(kept.parent.iterdir()) == []


@pytest.mark.parametrize("status", ["verified", "unclaimed"])
def test_what_is_right_later_is_forgotten(kept: Path, status: str) -> None:
    record(run("LIAR", SINKS, cell()))
    done = record(run("LIAR", {**SINKS, "status": status}, date=LATER))
    assert (done.refuted, done.cleared) == (0, 1)
    assert ids() == ["LIAR plain/mixed/d64/bfloat16/auto/b16/NHD"]


@pytest.mark.parametrize("status", ["not run", "declared", "refused"])
def test_what_was_not_run_again_stays(kept: Path, status: str) -> None:
    record(run("LIAR", SINKS))
    record(run("LIAR", {**SINKS, "status": status}, date=LATER))
    assert len(ids()) == 1


def test_what_was_right_elsewhere_or_in_another_cell_stays(kept: Path) -> None:
    right = {**SINKS, "status": "verified"}
    record(run("LIAR", SINKS))
    record(run("LIAR", right, date=LATER, versions={"Python": "3.9.1"}))
    record(run("LIAR", right, date=LATER, device="sm90"))
    record(run("LIAR", right, date=LATER, version="2.0"))
    record(run("OTHER", right, date=LATER))
    record(run("LIAR", cell("sinks", "decode", "verified", head_size=128), date=LATER))
    assert ids() == ["LIAR sinks/decode/d64/bfloat16/auto/b16/NHD"]


def test_a_run_of_before_changes_nothing_that_is_known_since(kept: Path) -> None:
    record(run("LIAR", SINKS, date=LATER))
    # The same day, said in another time zone and a moment earlier.
    done = record(run("LIAR", {**SINKS, "status": "verified"}, date="2026-11-22T19:59:59+02:00"))
    assert (done.refuted, done.cleared, len(ids())) == (0, 0, 1)
    record(run("LIAR", {**SINKS, "why": ["again"]}, date="2026-11-22T20:00:01+02:00"))
    ((found,),) = read_evidence().cells.values()
    assert found.why == ("again",)


def test_one_backend_can_be_forgotten_or_all(kept: Path) -> None:
    assert forget() == 0
    for name in ("LIAR", "OTHER"):
        record(run(name, SINKS, cell()))
    assert forget("NOBODY") == 0
    assert forget("LIAR") == 2
    assert len(ids()) == 2
    assert forget() == 2
    assert ids() == []


def test_it_is_json_with_a_cell_in_each_line(kept: Path) -> None:
    record(run("LIAR", SINKS, cell()))
    data = json.loads(kept.read_text())
    assert (data["schema"], data["version"]) == ("attnplug.refuted", 1)
    assert sum("head_size" in line for line in kept.read_text().splitlines()) == 2


WRITER = """
import sys
from evidence_runs import cell, run
from attnplug.registry.selection.evidence import record
for size in range(8):
    record(run(sys.argv[1], cell(head_size=8 + size)))
"""


def test_nothing_is_lost_where_several_record_at_once(kept: Path) -> None:
    path = {"PYTHONPATH": str(Path(__file__).parents[1])}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, f"LIAR_{index}"], env={**os.environ, **path})
        for index in range(4)
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0, 0]
    assert len(ids()) == 32
    assert sorted(each.name for each in kept.parent.iterdir()) == [kept.name, f"{kept.name}.lock"]


# Files that are none

WHOLE = {"schema": "attnplug.refuted", "version": 1, "runs": [run("LIAR", {**SINKS, "date": LATER})]}


def damaged(**changes: Any) -> str:
    (one,) = WHOLE["runs"]
    return json.dumps({**WHOLE, "runs": [{**one, **changes}]})


DAMAGED = {
    "half": (json.dumps(WHOLE)[:200], "is half written, or no JSON: .*delete it and verify again"),
    "deep": ("[" * 100_000, "is half written, or no JSON"),
    "list": ("[]", "has the schema None, version None, not 'attnplug.refuted', version 1"),
    "other": ('{"schema": "attnplug.matrix", "version": 1}', "has the schema 'attnplug.matrix', version 1"),
    "newer": ('{"schema": "attnplug.refuted", "version": 2}', "has the schema 'attnplug.refuted', version 2"),
    "no runs": ('{"schema": "attnplug.refuted", "version": 1}', "'runs' is missing"),
    "runs": ('{"schema": "attnplug.refuted", "version": 1, "runs": 1}', "cannot be made sense of"),
    "no run": ('{"schema": "attnplug.refuted", "version": 1, "runs": ["LIAR"]}', "cannot be made sense of"),
    "device": (damaged(device="H9000"), "device='H9000' is unknown"),
    "versions": (damaged(versions=["torch"]), "cannot be made sense of"),
    "backend": (damaged(backend=3), "backend is 3"),
    "date": (damaged(cells=[{**SINKS, "date": "yesterday"}]), "'yesterday'"),
    "no date": (damaged(cells=[SINKS]), "'date' is missing"),
    "size": (damaged(cells=[{**SINKS, "date": LATER, "head_size": "64"}]), "head_size is '64'"),
    "page": (damaged(cells=[{**SINKS, "date": LATER, "block_size": 1.5}]), "block_size is 1.5"),
    "layout": (damaged(cells=[{**SINKS, "date": LATER, "layout": 1}]), "layout is 1"),
    "why": (damaged(cells=[{**SINKS, "date": LATER, "why": WHY}]), "why is 'output"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_cannot_be_read_is_no_evidence_and_is_not_written_over(kept: Path, name: str) -> None:
    text, said = DAMAGED[name]
    kept.write_text(text)
    evidence = read_evidence()
    assert evidence.cells == {}
    assert evidence.read_error is not None
    assert evidence.read_error.startswith(str(kept))
    for write in (lambda: record(run("LIAR", SINKS)), forget):
        with pytest.raises(MatrixFileError, match=said):
            write()
    assert kept.read_text() == text


def test_text_of_another_encoding_is_no_evidence(kept: Path) -> None:
    kept.write_bytes(b"\xff\xfe\x00")
    assert "is half written, or no JSON" in str(read_evidence().read_error)


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("refuted.json").mkdir()
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(tmp_path))
    assert "refuted.json cannot be read: Is a directory" in str(read_evidence().read_error)
    with pytest.raises(MatrixFileError, match="cannot be read"):
        record(run("LIAR", SINKS))


def test_a_place_where_nothing_can_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("file").touch()
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(tmp_path / "file" / "refuted.json"))
    with pytest.raises(
        MatrixFileError, match=r"cannot be written: .*; name another file in ATTNPLUG_EVIDENCE"
    ):
        record(run("LIAR", SINKS))


def test_a_disk_that_is_full_leaves_what_was_known(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(run("LIAR", SINKS))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(MatrixFileError, match="cannot be written: No space left on device"):
            record(run("OTHER", SINKS))
    assert ids() == ["LIAR sinks/decode/d64/bfloat16/auto/b16/NHD"]


def test_a_writer_that_never_ends_is_not_waited_for(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    monkeypatch.setattr("attnplug._system.json_files._SECONDS", 0.01)
    with (
        FileLock(f"{kept}.lock"),
        pytest.raises(MatrixFileError, match=r"still being written .* after 0.01 s"),
    ):
        record(run("LIAR", SINKS))


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"device": None}, "device=None"), ({"cells": [{"status": "refuted"}]}, "'block_size' is missing")],
)
def test_a_run_that_is_none_is_refused(kept: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(MatrixFileError, match=f"cannot take the run in: .*{said}"):
        record({**run("LIAR", SINKS), **changes})
    assert not kept.exists()
