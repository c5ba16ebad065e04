"""Files in folders that others may write to: what is no regular file is named at once, and no write follows a trap."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from attnplug._system import files
from attnplug.errors import MatrixFileError

pytestmark = [
    pytest.mark.attack("files"),
    pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here"),
]
LONG = "n" * 300


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def device(path: Path) -> None:
    path.symlink_to("/dev/null")


def folder(path: Path) -> None:
    path.mkdir()


def loop(path: Path) -> None:
    path.symlink_to(path.name)


TRAPS = {
    "FIFO": (fifo, "it is a FIFO, not a regular file"),
    "socket": (unix_socket, "it is a socket, not a regular file"),
    "device": (device, "it is a device, not a regular file"),
    "folder": (folder, "Is a directory"),
    "loop": (loop, "Too many levels of symbolic links"),
}


def names(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder whose relative names are short, as the address of a socket must be."""
    monkeypatch.chdir(tmp_path)
    return Path()


@pytest.mark.parametrize("kind", TRAPS)
def test_what_is_no_regular_file_is_neither_read_nor_written(here, kind):
    make, cause = TRAPS[kind]
    path = here / "x"
    make(path)
    for ask in (
        files.read_text,
        files.read_bytes,
        files.check_output,
        lambda path: files.write_text(path, "new"),
    ):
        with pytest.raises(OSError, match=cause) as caught:
            ask(path)
        assert caught.value.filename == "x"
    assert names(here) == ["x"]


@pytest.mark.parametrize("kind", TRAPS)
def test_each_kind_of_file_answers_what_it_is(here, kind):
    path = here / "x"
    TRAPS[kind][0](path)
    assert files.has_name(path)
    # Nobody can tell what a loop of links is, so reading it says why.
    assert files.may_exist(path)
    assert files.is_folder(path) is (kind == "folder")
    assert files.is_special(path) is (kind in ("FIFO", "socket", "device"))


def test_a_name_without_a_file_and_a_link_to_nothing(here):
    missing, link, behind = here / "missing", here / "link", here / "file" / "x"
    link.symlink_to("missing")
    (here / "file").write_text("")
    assert [files.has_name(path) for path in (missing, link, behind)] == [False, True, False]
    assert [files.may_exist(path) for path in (missing, link, behind)] == [False, False, False]
    assert not any(files.is_special(path) or files.is_folder(path) for path in (missing, link, behind))
    assert not files.is_special(here / "file")
    assert not files.is_special(here)


@pytest.mark.parametrize(
    "raised", [PermissionError(13, "Permission denied"), ValueError("embedded null byte")]
)
def test_a_name_about_which_nobody_can_tell_may_exist(monkeypatch, raised):
    def refuse(path: Path, **options: object) -> os.stat_result:
        raise raised

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(Path, "lstat", refuse)
    path = Path("theirs")
    assert files.may_exist(path)
    assert files.has_name(path)
    assert not files.is_folder(path)
    assert not files.is_special(path)


def test_a_file_of_exactly_the_limit_is_read_and_a_larger_one_is_named(here):
    path = here / "x"
    path.write_bytes(b"12345")
    assert files.read_bytes(path, 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 bytes") as caught:
        files.read_bytes(path, 4)
    assert caught.value.errno == errno.EFBIG
    with path.open("wb") as file:
        file.truncate((2 << 20) + 1)
    with pytest.raises(OSError, match="it has more than 2 MiB"):
        files.read_bytes(path, 2 << 20)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_a_file_without_a_size_is_counted_by_its_contents():
    assert b"Name:" in files.read_bytes("/proc/self/status")
    with pytest.raises(OSError, match="it has more than 10 bytes"):
        files.read_bytes("/proc/self/status", 10)


def test_text_is_utf8(here):
    files.write_text(here / "x", "Grüße ✓")
    assert files.read_text(here / "x") == "Grüße ✓"
    files.write_bytes(here / "x", b"\xff")
    with pytest.raises(UnicodeDecodeError):
        files.read_text(here / "x")


def test_half_a_character_is_written_as_its_escape(here):
    files.write_text(here / "x", "half: \ud800")
    assert files.read_bytes(here / "x") == rb"half: \ud800"


def test_a_loop_of_links_is_told_by_older_versions_of_python_too(here, monkeypatch):
    def raises(path: Path) -> Path:
        raise RuntimeError("Symlink loop")

    monkeypatch.setattr(Path, "resolve", raises)
    with pytest.raises(OSError, match="Too many levels of symbolic links: 'x'") as caught:
        files.resolved(here / "x")
    assert caught.value.errno == errno.ELOOP


def test_a_failed_write_leaves_the_old_file_and_nothing_else(here, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (here / "x").write_text("old")
    monkeypatch.setattr("attnplug._system.files.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_text(here / "x", "new")
    assert (names(here), (here / "x").read_text()) == (["x"], "old")


def test_a_lock_is_made_in_a_regular_file_alone(here):
    files.check_lock(here / "lock")
    files.check_lock(here / "lock")
    assert (here / "lock").read_bytes() == b""
    (here / "link").symlink_to("lock")
    with pytest.raises(OSError, match="it is a symbolic link, not a regular file"):
        files.check_lock(here / "link")
    with pytest.raises(FileNotFoundError):
        files.check_lock(here / "missing" / "lock")


def test_a_temporary_folder_has_room_and_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with files.temporary_folder("mine-") as name:
        assert Path(name).parent == tmp_path
        assert Path(name).name.startswith("mine-")
        assert names(name) == []
    assert names(tmp_path) == []


@pytest.mark.parametrize("variable", [None, "/named"])
def test_a_folder_without_room_is_named_with_the_remedy(tmp_path, monkeypatch, variable):
    def full(path: Path, data: bytes) -> int:
        assert len(data) == 1 << 20
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "write_bytes", full)
    monkeypatch.delenv("TMPDIR", raising=False)
    if variable is not None:
        monkeypatch.setenv("TMPDIR", variable)
    with pytest.raises(MatrixFileError) as caught:
        files.temporary_folder("mine-")
    assert str(caught.value) == (
        f"{variable or tmp_path} cannot be used for temporary files: No space left on device; "
        "set TMPDIR to a folder with 1 MiB of room"
    )
    assert names(tmp_path) == []


def test_temporary_files_without_a_folder_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.delenv("TMPDIR", raising=False)
    with pytest.raises(MatrixFileError, match="the folder cannot be used for temporary files: No such file"):
        files.temporary_folder("mine-")


def test_the_cause_of_an_error_is_safe_to_print():
    assert files.why(OSError(errno.ENOENT, "no\x1b[31m file", "name")) == r"no\x1b[31m file"
    assert files.why(OSError("only a text")) == "only a text"


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_names_that_no_file_can_have_are_an_os_error(tmp_path, name):
    path = tmp_path / name
    for ask in (
        files.read_text,
        files.resolved,
        files.check_output,
        lambda path: files.write_text(path, "x"),
    ):
        with pytest.raises(OSError, match=r"null character|a character that no name can have"):
            ask(path)
    assert files.may_exist(path)
    assert not files.is_folder(path)


def test_a_check_of_an_output_leaves_nothing(tmp_path):
    (tmp_path / "new").mkdir()
    files.check_output(tmp_path / "new" / "m.json")
    assert [each.name for each in tmp_path.rglob("*")] == ["new"]
    (tmp_path / "new" / "m.json").write_text("old")
    files.check_output(tmp_path / "new" / "m.json")
    assert (tmp_path / "new" / "m.json").read_text() == "old"


def test_folders_are_made_all_or_none(tmp_path):
    with pytest.raises(OSError, match="File name too long"):
        files.make_folder(tmp_path / "a" / "b" / LONG)
    assert list(tmp_path.iterdir()) == []
    files.make_folder(tmp_path / "a" / "b")
    files.make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


def test_a_link_remains_and_its_target_is_written(tmp_path):
    target, link = tmp_path / "data" / "m.json", tmp_path / "m.json"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to("data/m.json")
    files.write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["data", "m.json", "m.json"]


def test_a_link_to_a_file_that_does_not_exist_makes_it(tmp_path):
    link = tmp_path / "m.json"
    link.symlink_to("other.json")
    files.write_text(link, "new")
    assert (link.is_symlink(), (tmp_path / "other.json").read_text()) == (True, "new")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o444])
def test_a_file_keeps_its_permissions(tmp_path, mode):
    path = tmp_path / "m.json"
    path.write_text("old")
    path.chmod(mode)
    files.write_text(path, "new")
    assert (stat.S_IMODE(path.stat().st_mode), path.read_text()) == (mode, "new")


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        files.write_text(tmp_path / "m.json", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "m.json").stat().st_mode) == 0o640


def test_a_planted_temporary_file_is_not_written(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    monkeypatch.setattr("attnplug._system.files.secrets.token_hex", lambda count: "known")
    (tmp_path / ".attnplug-known").symlink_to(victim)
    with pytest.raises(OSError, match="File exists"):
        files.write_text(tmp_path / "m.json", "new")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "m.json").exists()
