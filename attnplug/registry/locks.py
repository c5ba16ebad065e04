"""A lock beside a file that several processes write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.core import files
from attnplug.core.errors import MatrixFileError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

_SECONDS = 60


def locked(path: Path, remedy: str) -> AbstractContextManager[object]:
    """Hold the lock of `path`, whose folder is made; MatrixFileError with `remedy` where it cannot be."""
    from filelock import FileLock, Timeout

    lock = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link planted there would make the lock empty the file to which it points.
        files.check_lock(lock)
        return FileLock(lock).acquire(timeout=_SECONDS)
    except Timeout:
        what = f"is still being written by another process after {_SECONDS} s"
        raise MatrixFileError(path, what, "try again") from None
    except OSError as problem:
        raise unwritable(path, problem, remedy) from None


def unwritable(path: Path, problem: OSError, remedy: str) -> MatrixFileError:
    """The error for a file that cannot be written."""
    return MatrixFileError(path, f"cannot be written: {files.why(problem)}", remedy)
