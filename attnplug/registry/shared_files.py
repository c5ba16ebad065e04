"""JSON files that several processes write: read strictly, and locked by a file beside them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from attnplug.core import files
from attnplug.core.errors import MatrixFileError
from attnplug.core.json_reading import parse_json

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

_SECONDS = 60
_OF_SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")
"""Folders whose files are not the user's, although root may delete them."""


def read_document(path: Path, schema: str, version: int, remedy: str) -> dict[str, Any]:
    """The JSON object of a schema in a file.

    Raises:
        FileNotFoundError: there is no file.
        MatrixFileError: it cannot be read, is no JSON, or has another schema; with `remedy`.
    """
    try:
        data = parse_json(files.read_text(path))
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise unreadable(path, problem, remedy) from None
    except ValueError as problem:
        raise MatrixFileError(path, f"is half written, or no JSON: {problem}", remedy) from None
    about = (data.get("schema"), data.get("version")) if isinstance(data, dict) else (None, None)
    if about != (schema, version):
        found = f"{about[0]!r:.60}, version {about[1]!r:.20}"
        raise MatrixFileError(path, f"has the schema {found}, not {schema!r}, version {version}", remedy)
    document: dict[str, Any] = data
    return document


def remedy_for(path: Path, delete: str, rename: str) -> str:
    """`delete`, which says to delete the file, for a plain file that the user may delete; else `rename`."""
    try:
        is_plain = path.is_file()
        here = path.resolve()
    except (OSError, RuntimeError):
        return rename
    is_of_system = any(here.is_relative_to(each) for each in _OF_SYSTEM)
    return delete if is_plain and not is_of_system and os.access(here.parent, os.W_OK) else rename


def told(problem: Exception) -> str:
    """What an error of reading malformed JSON says; that of a missing key is the key alone."""
    return f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)


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


def unreadable(path: Path, problem: OSError, remedy: str) -> MatrixFileError:
    """The error for a file that cannot be read."""
    return MatrixFileError(path, f"cannot be read: {files.why(problem)}", remedy)


def unwritable(path: Path, problem: OSError, remedy: str) -> MatrixFileError:
    """The error for a file that cannot be written."""
    return MatrixFileError(path, f"cannot be written: {files.why(problem)}", remedy)
