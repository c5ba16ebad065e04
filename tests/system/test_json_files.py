"""JSON that several processes write: every fault of it is told by its cause, and its lock is one of a regular file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import filelock
import pytest
from filelock import FileLock

from attnplug._system import json_files
from attnplug._system.json_files import locked, parse_json, read_document, remedy_for, whole_json
from attnplug.errors import MatrixFileError

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the causes are those of Linux")


@pytest.mark.parametrize("text", [r'"\ud800"', r'[{"a": ["\ud800"]}]', r'{"\ud800": 1}', r'["\ude00\ud83d"]'])
def test_half_a_character_anywhere_is_a_fault(text):
    half = r"\ude00" if "ude00" in text else r"\ud800"
    with pytest.raises(ValueError, match="which is no Unicode") as caught:
        parse_json(text, strict=False)
    assert str(caught.value) == f"a text has the half character '{half}', which is no Unicode"


def test_half_a_character_reads_back_as_its_escape():
    assert json.loads(whole_json('["a\udfff", "\U0001f600"]')) == [r"a\udfff", "\U0001f600"]


def test_a_document_of_another_schema_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(FileNotFoundError):
        read_document(path, "mine", 1, "delete it")
    path.write_text('{"schema": "mine", "version": 1, "rows": []}')
    assert read_document(path, "mine", 1, "delete it")["rows"] == []
    for text, said in {
        '{"schema": "mine", "version": 2}': "has the schema 'mine', version 2, not 'mine', version 1; delete it",
        "[]": "has the schema None, version None, not 'mine', version 1; delete it",
        '{"schema"': "is half written, or no JSON: ",
    }.items():
        path.write_text(text)
        with pytest.raises(MatrixFileError) as caught:
            read_document(path, "mine", 1, "delete it")
        assert str(caught.value).startswith(f"{path} {said}")


def test_only_a_file_of_the_user_is_to_be_deleted(tmp_path):
    (tmp_path / "x").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    asked = [tmp_path / "x", tmp_path, tmp_path / "missing", tmp_path / "loop", Path("/etc/passwd")]
    assert [remedy_for(path, "delete", "rename") for path in asked] == ["delete", *["rename"] * 4]


def test_a_lock_that_another_holds_for_too_long_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "_SECONDS", 0.01)
    # A lock of another object is one of another process to it.
    with filelock.FileLock(tmp_path / "x.json.lock"), pytest.raises(MatrixFileError) as caught:
        locked(tmp_path / "x.json", "name another file")
    assert str(caught.value) == (
        f"{tmp_path / 'x.json'} is still being written by another process after 0.01 s; try again"
    )


@on_linux
def test_a_lock_that_cannot_be_made_is_no_lock_of_another_process():
    with pytest.raises(MatrixFileError, match=r"/proc/x.json cannot be written: .*; elsewhere"):
        locked(Path("/proc/x.json"), "elsewhere")


def test_whole_characters_of_two_escapes_are_read():
    assert parse_json(r'["\ud83d\ude00", "\\ud800"]') == ["\U0001f600", r"\ud800"]


def test_a_lock_left_by_an_earlier_run_is_used(tmp_path):
    with FileLock(tmp_path / "refuted.json.lock"):
        pass
    with locked(tmp_path / "refuted.json", "name another file"):
        assert (tmp_path / "refuted.json.lock").is_file()


def test_the_infinity_that_transformers_writes_is_read():
    assert parse_json(json.dumps([0.0, float("inf")]), strict=False) == [0.0, float("inf")]
