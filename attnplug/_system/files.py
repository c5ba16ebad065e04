"""Reads and writes files in folders that others may write to: no read blocks, and no write follows a trap."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attnplug._system.text import safe_text
from attnplug.core.errors import MatrixFileError

if TYPE_CHECKING:
    import tempfile

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}
_MIB = 1 << 20
_ROOM = _MIB
"""Bytes that the temporary files of a run may have: its task, report and log."""
# A FIFO opened with O_NONBLOCK does not wait for a writer. Windows has none of these flags.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
_LOCK = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def read_text(path: str | os.PathLike[str], most: int = 64 * _MIB) -> str:
    """The UTF-8 text of a regular file of at most `most` bytes; a symbolic link is followed.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger; `strerror` says which.
        UnicodeDecodeError: the file is not UTF-8.
    """
    return read_bytes(path, most).decode("utf-8")


def read_bytes(path: str | os.PathLike[str], most: int = 64 * _MIB) -> bytes:
    """The contents of a regular file of at most `most` bytes; OSError as `read_text`."""
    with _named(path):
        # Checked before opening too, because opening a device may already do something.
        check_regular(os.stat(path), path)  # noqa: PTH116  (as Path.stat, for any kind of path)
        handle = os.open(path, _READ)
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        check_regular(about, path)
        # Files of /proc have no size, so the contents count too.
        data = file.read(most + 1) if about.st_size <= most else b""
        if about.st_size > most or len(data) > most:
            limit = (
                f"it has more than {most // _MIB} MiB" if most >= _MIB else f"it has more than {most} bytes"
            )
            raise OSError(errno.EFBIG, limit, str(path))
    return data


def read_tail(path: Path, most: int = _MIB) -> bytes:
    """The last `most` bytes of a regular file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - most))
                return file.read(most)
    return b""


def may_exist(path: Path) -> bool:
    """Whether there is a file, or nobody can tell, such as in a folder of another user: reading it says why.

    A link to a file that is missing is none.
    """
    return _mode(path) is not None


def has_name(path: Path) -> bool:
    """As `may_exist`, but a link counts even if its target is missing."""
    return _mode(path, follow_symlinks=False) is not None


def is_folder(path: Path) -> bool:
    """Whether there is a folder; False if nobody can tell."""
    return stat.S_ISDIR(_mode(path) or 0)


def is_special(path: Path) -> bool:
    """Whether there is something that is neither a folder nor a regular file; False if nobody can tell."""
    mode = _mode(path) or 0
    return mode != 0 and not stat.S_ISDIR(mode) and not stat.S_ISREG(mode)


def _mode(path: Path, *, follow_symlinks: bool = True) -> int | None:
    """The mode of a file; None without one, and 0 if nobody can tell."""
    try:
        return path.stat(follow_symlinks=follow_symlinks).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        return 0


def resolved(path: Path) -> Path:
    """The absolute path without links; OSError for a loop of links and for a name that cannot be."""
    with _named(path):
        try:
            return path.resolve()
        except RuntimeError:  # Python before 3.13
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None


def check_output(path: Path) -> None:
    """OSError if no file can be written at `path`; said before the minutes that a run may take.

    It leaves no file there.
    """
    target = resolved(path)
    with contextlib.suppress(FileNotFoundError):
        check_regular(target.lstat(), path)
    handle, unfinished = _unfinished(target, None)
    os.close(handle)
    unfinished.unlink()


def make_folder(path: Path) -> None:
    """Make a folder and those above it, all or none; OSError if they cannot be made."""
    missing: list[Path] = []
    folder = path
    with _named(path):
        for folder in (path, *path.parents):
            try:
                folder.stat()
                break
            except FileNotFoundError:
                missing.append(folder)
        made: list[Path] = []
        try:
            # The first one is there already, unless it is a file.
            for each in (folder, *reversed(missing)):
                if not is_folder(each):
                    each.mkdir(exist_ok=True)
                    made.append(each)
        except OSError:
            for each in reversed(made):
                each.rmdir()
            raise


def temporary_folder(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A new folder with room for some files, which is removed at the end of a `with` block.

    Raises:
        MatrixFileError: the room is not there; the error names the folder of temporary files.
    """
    import tempfile

    made = None
    try:
        made = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        room = Path(made.name, "room")
        room.write_bytes(bytes(_ROOM))
        room.unlink()
    except OSError as problem:
        if made is not None:
            made.cleanup()
        where = os.environ.get("TMPDIR") or ("the folder" if made is None else Path(made.name).parent)
        remedy = f"set TMPDIR to a folder with {_ROOM // _MIB} MiB of room"
        raise MatrixFileError(where, f"cannot be used for temporary files: {why(problem)}", remedy) from None
    return made


@contextlib.contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make an OSError of the ValueError for a name that no file can have."""
    try:
        yield
    except UnicodeEncodeError:
        raise OSError(errno.EINVAL, "its name has a character that no name can have", str(path)) from None
    except ValueError:
        raise OSError(errno.EINVAL, "its name has a null character", str(path)) from None


def check_regular(about: os.stat_result, path: str | os.PathLike[str]) -> None:
    """OSError if `about` describes anything but a regular file; `strerror` says what it is."""
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def check_lock(path: Path) -> None:
    """OSError if no regular file can be opened, or made, where a lock file will be opened."""
    with contextlib.suppress(FileNotFoundError):
        check_regular(path.lstat(), path)
    # The lock itself would be tried again and again, as if another process had it.
    os.close(os.open(path, _LOCK, 0o666))


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to a new file beside `path`, then rename it; OSError leaves `path` as it was.

    A reader finds the old text or the new one, even if the writer is killed. A file that exists keeps its
    permissions. A symbolic link remains, and the file to which it points is replaced.
    """
    # Half a character, as a backend may put into a message, is written as its escape.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, data: bytes) -> None:
    """As `write_text`, for bytes."""
    # A rename works within one file system, so the new file lies beside the file that it replaces.
    target = resolved(path)
    try:
        about = target.lstat()
    except FileNotFoundError:
        mode = None
    else:
        check_regular(about, path)
        mode = stat.S_IMODE(about.st_mode) & 0o777
    handle, unfinished = _unfinished(target, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            # The data must be on disk before the rename, or a crash could leave an empty file.
            os.fsync(handle)
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(handle, mode)
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _unfinished(target: Path, mode: int | None) -> tuple[int, Path]:
    """A new file beside `target`, open for writing, and its path."""
    # The name cannot be guessed, and O_EXCL refuses one that exists: nobody can plant a link there.
    unfinished = target.with_name(f".attnplug-{secrets.token_hex(8)}")
    return os.open(unfinished, _NEW, 0o666 if mode is None else 0o600), unfinished


def why(problem: OSError) -> str:
    """The cause of an OSError in words that are safe to print."""
    return safe_text(problem.strerror or str(problem))
