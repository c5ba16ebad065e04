"""Reads and writes files in folders that others may write to: no read blocks, and no write follows a trap."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path

from attnplug.core.text import safe_text

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}
_MIB = 1 << 20
# A FIFO opened with O_NONBLOCK does not wait for a writer. Windows has none of these flags.
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
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


def may_exist(path: Path) -> bool:
    """Whether there is a file, or nobody can tell, such as in a folder of another user: reading it says why."""
    try:
        return path.exists()
    except OSError:
        return True


def check_regular(about: os.stat_result, path: str | os.PathLike[str]) -> None:
    """OSError if `about` describes anything but a regular file; `strerror` says what it is."""
    if stat.S_ISDIR(about.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


def check_lock(path: Path) -> None:
    """OSError if something else than a regular file lies where a lock file will be opened."""
    try:
        check_regular(path.lstat(), path)
    except FileNotFoundError:
        return


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to a new file beside `path`, then rename it; OSError leaves `path` as it was.

    A reader finds the old text or the new one, even if the writer is killed. A file that exists keeps its
    permissions. A symbolic link remains, and the file to which it points is replaced.
    """
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """As `write_text`, for bytes."""
    # A rename works within one file system, so the new file lies beside the file that it replaces.
    target = path.resolve()
    try:
        about = target.lstat()
    except FileNotFoundError:
        mode = None
    else:
        check_regular(about, path)
        mode = stat.S_IMODE(about.st_mode) & 0o777
    # The name cannot be guessed, and O_EXCL refuses one that exists: nobody can plant a link there.
    unfinished = target.with_name(f".attnplug-{secrets.token_hex(8)}")
    handle = os.open(unfinished, _NEW, 0o666 if mode is None else 0o600)
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


def why(problem: OSError) -> str:
    """The cause of an OSError in words that are safe to print."""
    return safe_text(problem.strerror or str(problem))
