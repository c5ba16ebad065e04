"""Files in shared folders: no read blocks, no write follows a trap, and a link's target is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from attnplug._system.json_files import locked
from attnplug.core.errors import MatrixFileError, ModelConfigError, PolicyError, SpecError
from attnplug.matrix.results import read_matrix, write_file
from attnplug.registry.selection import evidence as refuted
from attnplug.registry.selection.decision import Decision
from attnplug.testing.conformance.check_filter import read_known_failures

pytestmark = [
    pytest.mark.attack("files"),
    pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here"),
]

LONG = f"[{'9' * 5000}]"


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def folder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


TRAPS = {
    "FIFO": (fifo, "it is a FIFO, not a regular file"),
    "device": (device, "it is a device, not a regular file"),
    "huge": (huge, "it has more than"),
    "folder": (folder, "Is a directory|config.json"),
    "loop": (loop, "Too many levels of symbolic links"),
}


@pytest.fixture(params=TRAPS.values(), ids=TRAPS)
def trap(request, tmp_path):
    """A path at which no file can be read, and the cause."""
    make, cause = request.param
    path = tmp_path / "refuted.json"
    make(path)
    return path, cause


def test_evidence_that_cannot_be_read_is_named_at_once(trap, monkeypatch):
    path, cause = trap
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(path) if not path.is_dir() else str(path.parent))
    error = refuted.read_evidence().read_error
    assert str(path) in error
    with pytest.raises(MatrixFileError, match=cause):
        refuted.forget()


def test_a_matrix_that_cannot_be_read_is_named_at_once(trap):
    path, cause = trap
    with pytest.raises(MatrixFileError, match=cause):
        read_matrix(path)


def test_a_list_of_known_failures_that_cannot_be_read_is_named_at_once(trap):
    path, cause = trap
    with pytest.raises(PolicyError, match=cause):
        read_known_failures(path)


def test_a_configuration_that_cannot_be_read_is_named_at_once(trap):
    load_config = pytest.importorskip("attnplug.integrations.reader.config_file").load_config
    path, cause = trap
    with pytest.raises(ModelConfigError, match=cause):
        load_config(path)


def test_a_configuration_of_a_folder_may_be_a_fifo_too(tmp_path):
    load_config = pytest.importorskip("attnplug.integrations.reader.config_file").load_config
    fifo(tmp_path / "config.json")
    with pytest.raises(ModelConfigError, match="it is a FIFO"):
        load_config(tmp_path)


def test_select_ends_with_a_message(run, tmp_path):
    fifo(tmp_path / "config.json")
    outcome = run("select", tmp_path)
    assert (outcome.code, outcome.out) == (2, "")
    assert "it is a FIFO, not a regular file" in outcome.err


@pytest.mark.parametrize(("make", "kind"), [(fifo, "a FIFO"), (device, "a device")])
def test_nothing_is_written_into_what_is_no_file(tmp_path, make, kind):
    path = tmp_path / "m.json"
    make(path)
    with pytest.raises(MatrixFileError, match=f"cannot be written: it is {kind}"):
        write_file(path, "text")
    assert not path.is_file()


def test_an_output_that_is_no_file_is_refused_before_the_run(run, tmp_path):
    fifo(tmp_path / "m.json")
    outcome = run("matrix", "--verify", "--device", "cpu", "--json", tmp_path / "m.json")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--json=" in outcome.err
    assert "is not a regular file" in outcome.err


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "m.json"
    path.write_text("old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attnplug._system.files.os.fsync", full)
    with pytest.raises(MatrixFileError, match="No space left"):
        write_file(path, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["m.json"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("make", [fifo, lambda path: path.symlink_to("victim")])
def test_a_planted_lock_is_not_opened(tmp_path, monkeypatch, make):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    make(tmp_path / "refuted.json.lock")
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(tmp_path))
    with pytest.raises(MatrixFileError, match="not a regular file"):
        locked(tmp_path / "refuted.json", "name another file")
    assert victim.read_text() == "mine"


DAMAGED = {
    "integer": (LONG, "more than 4300 digits"),
    "NaN": ("[NaN]", "NaN is not a JSON number"),
    "Infinity": ('{"runs": -Infinity}', "-Infinity is not a JSON number"),
    "deep": ("[" * 200_000, "nested too deeply"),
}


@pytest.mark.parametrize(("text", "cause"), DAMAGED.values(), ids=DAMAGED)
def test_json_that_python_cannot_hold_is_refused_by_its_cause(tmp_path, monkeypatch, text, cause):
    path = tmp_path / "refuted.json"
    path.write_text(text)
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(path))
    assert cause in refuted.read_evidence().read_error
    with pytest.raises(MatrixFileError, match=cause):
        read_matrix(path)
    with pytest.raises(SpecError, match=cause):
        Decision.from_json(text)
