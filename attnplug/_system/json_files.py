"""JSON files that several processes write: read strictly, and locked by a file beside them.

Reads values back from JSON that may be damaged: every fault becomes one SpecError.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from attnplug._system import files
from attnplug._system.text import shortened
from attnplug.core.errors import MatrixFileError, SpecError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path


_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape of half a character; two of them in a row are one character."""


def whole_json(text: str) -> str:
    r"""JSON text with each half character as the six characters of its escape, so that it reads back."""
    return _SURROGATE.sub(lambda found: rf"\\u{ord(found[0]):04x}", text)


_SURROGATE = re.compile("[\ud800-\udfff]")


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise a SpecError about `what` for every fault of the data that is read inside the block."""
    try:
        yield
    except SpecError as error:
        raise error if error.field == what else _damaged(what, error) from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(what, error) from error


def _damaged(what: str, error: Exception) -> SpecError:
    missing = isinstance(error, KeyError)
    found = f"lacks {error}" if missing else str(error)
    return SpecError(what, "JSON", f"is not what to_json wrote: {found}")


def typed(data: Mapping[str, Any], name: str, *kinds: type | None) -> Any:
    """`data[name]`, which must be of exactly one of `kinds`; TypeError for another type."""
    value = data[name]
    if type(value) not in [type(None) if kind is None else kind for kind in kinds]:
        expected = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
        raise TypeError(f"{name} must be {expected}, not {type(value).__name__}")
    return value


def texts(data: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """`data[name]` as a tuple; TypeError if it is not a list of text."""
    values = cast("list[Any]", typed(data, name, list))
    if not all(type(value) is str for value in values):
        raise TypeError(f"{name} must be a list of text")
    return tuple(values)


def parse_json(text: str, *, strict: bool = True) -> Any:
    r"""The value of JSON text; ValueError for every fault, too deep nesting and too long integers included.

    With `strict`, NaN and Infinity are faults, because JSON has no such numbers. Half a character, such as "\ud800"
    alone, is always one: no file and no terminal can have it.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant if strict else None)
        if _HALF.search(text):
            _check_whole(value)
        return value
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except json.JSONDecodeError:
        raise
    except ValueError as problem:
        # Python's own message names a function of sys, which no reader of a file can call.
        if "digits" not in str(problem):
            raise
        raise ValueError(f"an integer has more than {sys.get_int_max_str_digits()} digits") from None


def _check_whole(value: Any) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as problem:
            half = ascii(value[problem.start])
            raise ValueError(f"a text has the half character {half}, which is no Unicode") from None
    elif isinstance(value, dict):
        for name, each in value.items():
            _check_whole(name)
            _check_whole(each)
    elif isinstance(value, list):
        for each in value:
            _check_whole(each)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


_SECONDS = 60
# Files in these folders are not the user's, although root may delete them.
_OF_SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")


def read_document(path: Path, schema: str, version: int, remedy: str) -> dict[str, Any]:
    """The JSON object of a schema in a file.

    Raises:
        FileNotFoundError: the file is missing.
        MatrixFileError: it cannot be read, is not JSON, or has another schema; with `remedy`.
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


def json_problem(problem: Exception) -> str:
    """The text of an error of reading malformed JSON, which may quote a long value; that of a missing key has the key alone."""
    return shortened(f"{problem} is missing" if isinstance(problem, KeyError) else str(problem), 500)


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
