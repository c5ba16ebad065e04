"""Names, links, folders and texts that no file can have: one sentence, exit code 2, and nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

from attnplug._system import files
from attnplug._system.json_files import whole_json
from attnplug.core.errors import MatrixFileError, ModelConfigError, PolicyError
from attnplug.integrations.reader.config_json import config_path, parse
from attnplug.matrix.model import Cell, Finding, Matrix, Run, Status
from attnplug.matrix.results import read_matrix, write_matrix
from attnplug.testing.conformance.check_filter import read_known_failures
from attnplug.testing.isolation.listing import SuiteRequest, list_checks

pytestmark = [
    pytest.mark.attack("files"),
    pytest.mark.skipif(sys.platform != "linux", reason="the causes are those of Linux"),
]
MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "qwen3-8b.json"
LONG = "n" * 300


def loop(folder: Path) -> Path:
    path = folder / "loop.json"
    path.symlink_to(path.name)
    return path


def behind_a_loop(folder: Path) -> Path:
    return loop(folder) / "x.json"


def behind_a_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file" / "x.json"


BAD = {
    "long": (lambda folder: folder / f"{LONG}.json", "File name too long"),
    "long folder": (lambda folder: folder / LONG / "x.json", "File name too long"),
    "loop": (loop, "Too many levels of symbolic links"),
    "behind a loop": (behind_a_loop, "Too many levels of symbolic links"),
    "proc": (lambda folder: Path("/proc/x.json"), "No such file or directory|Permission denied"),
    "proc itself": (lambda folder: Path("/proc/self/nothing.json"), "No such file or directory|Permission"),
    "behind a file": (behind_a_file, "Not a directory|File exists|no such file|no folder"),
}
NEW = (lambda folder: folder / "new" / LONG / "x.json", "File name too long")
OUTPUTS = {
    "matrix --json": ("matrix", "--device", "h100", "--backend", "TORCH", "--json", None),
    "matrix --html": ("matrix", "--device", "h100", "--backend", "TORCH", "--html", None),
    "matrix --markdown": ("matrix", "--device", "h100", "--backend", "TORCH", "--markdown", None),
    "merge -o": ("matrix", "merge", "-o", None, "m.json"),
    "merge --html": ("matrix", "merge", "--html", None, "m.json"),
    "diff --json": ("matrix", "diff", "m.json", "m.json", "--json", None),
    "conformance --junit": ("conformance", "TORCH", "--junit", None),
    "tune -o": ("tune", MODEL, "--device", "cpu", "-o", None),
}
INPUTS = {
    "select": ("select", None),
    "tune": ("tune", None, "--device", "cpu"),
    "merge": ("matrix", "merge", None),
    "diff": ("matrix", "diff", None, None),
    "tuned": ("select", MODEL, "--device", "h100", "--tuned", None),
}


@pytest.fixture
def bad(request, tmp_path):
    make, cause = {**BAD, "new": NEW}[request.param]
    return make(tmp_path), cause


def one_sentence(outcome, path: Path) -> None:
    assert outcome.code == 2, outcome
    said = outcome.err.strip()
    assert said.startswith("attnplug: ")
    assert said.count("\n") == 0
    assert str(path) in said


@pytest.mark.parametrize("bad", BAD, indirect=True)
@pytest.mark.parametrize("command", OUTPUTS.values(), ids=OUTPUTS)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(
    run, bad, command, tmp_path, monkeypatch
):
    path, cause = bad
    monkeypatch.chdir(tmp_path)
    write_matrix(Matrix(()), tmp_path / "m.json")
    before = sorted(tmp_path.rglob("*"))
    outcome = run(*(path if word is None else word for word in command))
    one_sentence(outcome, path)
    if "conformance" not in command:
        assert re.search(cause, outcome.err)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("bad", BAD, indirect=True)
@pytest.mark.parametrize("command", INPUTS.values(), ids=INPUTS)
def test_an_input_that_cannot_be_read_is_refused(run, bad, command):
    path, _ = bad
    one_sentence(run(*(path if word is None else word for word in command)), path)


@pytest.mark.parametrize("bad", BAD, indirect=True)
def test_known_failures_that_cannot_be_read_are_refused(bad):
    path, _ = bad
    with pytest.raises(PolicyError, match="cannot be read") as caught:
        read_known_failures(path)
    assert str(path) in str(caught.value)


def test_a_kit_with_known_failures_that_cannot_be_read_is_refused(run, tmp_path):
    """It lists its checks in another process before, which takes seconds."""
    one_sentence(run("conformance", "TORCH", "--known-failures", loop(tmp_path)), tmp_path / "loop.json")


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_configuration_that_no_file_can_have_as_its_name_is_refused(tmp_path, name):
    with pytest.raises(ModelConfigError, match="cannot be read"):
        parse(config_path(tmp_path / name))


def test_a_full_file_system_is_told_by_its_path(run, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "m.json"
    outcome = run("matrix", "--device", "h100", "--backend", "TORCH", "--json", path)
    one_sentence(outcome, path)
    assert "No space left on device" in outcome.err
    assert list(tmp_path.iterdir()) == []


NO_ROOM = {
    "doctor": ("doctor", "TORCH"),
    "conformance": ("conformance", "TORCH", "--list"),
    "matrix --verify": ("matrix", "--verify", "--device", "cpu", "--backend", "TORCH", "--only", "plain/*/d64/*"),
    "tune": ("tune", MODEL, "--device", "cpu", "--batch", "1", "--context", "64"),
}  # fmt: skip


@pytest.mark.parametrize("full", ["no folder", "no bytes"])
@pytest.mark.parametrize("command", NO_ROOM.values(), ids=NO_ROOM)
def test_a_full_folder_of_temporary_files_is_named(run, command, full, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "tmp").mkdir()
    no_space = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if full == "no folder":
        monkeypatch.setattr(tempfile, "mkdtemp", lambda *_, **__: (_ for _ in ()).throw(no_space))
    else:
        plain = Path.write_bytes

        def write(path: Path, data: bytes) -> int:
            if tmp_path / "tmp" in path.parents:
                raise no_space
            return plain(path, data)

        monkeypatch.setattr(Path, "write_bytes", write)
    outcome = run(*command)
    assert outcome.code == 2, outcome
    assert f"attnplug: {tmp_path / 'tmp'} cannot be used for temporary files: No space left on device; " in (
        outcome.err
    )
    assert "set TMPDIR to a folder with 1 MiB of room" in outcome.err
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("escape", [r"\ud800", r"\udfff", r"\uDC00x", r"\ud83d \ude00", r"\ude00\ud83d"])
def test_half_a_character_in_a_file_is_refused_by_its_path(run, tmp_path, escape):
    write_matrix(Matrix(()), tmp_path / "good.json")
    good = (tmp_path / "good.json").read_text()
    run_ = {
        "backend": f"B{escape}",
        "distribution": None,
        "version": None,
        "device": "cpu",
        "device_name": None,
    }
    run_ |= {"versions": {}, "date": "2026-11-21T18:00:00+00:00", "commit": None, "cells": []}
    path = tmp_path / "m.json"
    path.write_text(good.replace("[]", f"[{json.dumps(run_)}]").replace("\\\\", "\\"))
    for output in (
        ("--html", tmp_path / "o.html"),
        ("--markdown", tmp_path / "o.md"),
        ("-o", tmp_path / "o"),
    ):
        outcome = run("matrix", "merge", path, *output)
        one_sentence(outcome, path)
        assert "half character" in outcome.err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["good.json", "m.json"]


@pytest.mark.parametrize("place", ["architectures", "model_type", "a name"])
def test_half_a_character_in_a_configuration_is_refused(run, tmp_path, place):
    config = json.loads(MODEL.read_text())
    config |= {"architectures": ["A\ud800"]} if place == "architectures" else {}
    config |= {"model_type": "\udc01llama"} if place == "model_type" else {}
    config |= {"\ud800": 1} if place == "a name" else {}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    one_sentence(run("select", path), path)


def test_a_message_with_half_a_character_is_written_so_that_it_reads_back(tmp_path):
    cell = Cell("plain", "decode", 64, "float16", "auto", 16, "NHD")
    about = {"distribution": None, "version": None, "device_name": None, "versions": {}, "commit": None}
    finding = Finding(cell, Status.REFUTED, ("it said \ud800",))
    made = Run(backend="B", device="cpu", date="2026-11-21T18:00:00+00:00", findings=(finding,), **about)
    write_matrix(Matrix((made,)), tmp_path / "m.json")
    assert read_matrix(tmp_path / "m.json").runs[0].findings[0].why == (r"it said \ud800",)
    assert whole_json('["a\udfff"]') == r'["a\\udfff"]'
    files.write_text(tmp_path / "m.html", "half: \ud800")
    assert (tmp_path / "m.html").read_bytes() == rb"half: \ud800"


def test_a_listing_without_room_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(
        MatrixFileError, match="cannot be used for temporary files: No such file or directory"
    ):
        list_checks(SuiteRequest("TORCH"), 10.0)


@pytest.mark.parametrize("bad", [*BAD, "new"], indirect=True)
def test_a_package_in_a_folder_that_cannot_be_is_refused(run, bad, tmp_path):
    path, cause = bad
    before = sorted(tmp_path.rglob("*"))
    outcome = run("new-backend", "acme", "--path", path)
    one_sentence(outcome, path)
    assert re.search(cause, outcome.err)
    assert sorted(tmp_path.rglob("*")) == before
