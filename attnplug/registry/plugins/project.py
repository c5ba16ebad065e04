"""`[tool.attnplug]` in pyproject.toml: a project's settings, which come after arguments and the environment.

The command line alone reads them, with its worker processes. A library that did would choose by the folder in which its
process was started.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attnplug._system import files
from attnplug.core.errors import PolicyError
from attnplug.registry.plugins.option_values import as_tuples

PROJECT = "pyproject.toml"
"""The source of a rule in such a file."""
_VARIABLE = "_ATTNPLUG_FOLDER"
_PREFIX = "ATTNPLUG_"
_ROOTS = (".git", ".hg")
_MOST_BYTES = 1 << 20


class Search:
    """The folder in which the search begins; None in programs other than attnplug's, which read no such file."""

    folder: str | None = os.environ.get(_VARIABLE)


@contextlib.contextmanager
def read_from_here() -> Iterator[None]:
    """Inside the block, this process and its children take settings from the project of the current folder."""
    before = Search.folder
    # The current folder may have been removed.
    with contextlib.suppress(OSError):
        os.environ[_VARIABLE] = Search.folder = str(Path.cwd())
    try:
        yield
    finally:
        Search.folder = before
        if before is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = before


def project_value(key: str) -> Any:
    """The value of a key of the table; None without one. The file is read once, at the first call.

    Raises:
        PolicyError: the file cannot be read, or has an unknown key or a value of another form.
    """
    return None if Search.folder is None else read_project(Search.folder).get(key)


def setting(variable: str) -> tuple[str | None, str]:
    """The text of a variable and its source: the variable, or else the project's file."""
    text = os.environ.get(variable)
    if text is None:
        key = variable.removeprefix(_PREFIX).lower().replace("_", "-")
        if (value := project_value(key)) is not None:
            return value, PROJECT
    return text, variable


@functools.lru_cache(maxsize=8)
def read_project(folder: str) -> Mapping[str, Any]:
    """The nearest table `[tool.attnplug]` in `folder` or above it, up to the root of the repository.

    Lists become the texts of the environment variables, and files are relative to the folder of the table.
    """
    for path in _candidates(Path(folder)):
        text = read_toml_text(path, PROJECT)
        # Most projects have no such table, and need no parser.
        tool = read_toml(path, PROJECT, text).get("tool") if "attnplug" in text else None
        if isinstance(tool, dict) and "attnplug" in tool:
            return _checked(path, tool["attnplug"])
    return {}


def _candidates(folder: Path) -> list[Path]:
    found = []
    for each in (folder, *folder.parents):
        if files.may_exist(each / PROJECT):
            found.append(each / PROJECT)
        if any(files.has_name(each / root) for root in _ROOTS):
            return found
    # Outside of a repository a parent, such as /tmp, may belong to other users.
    return [path for path in found if path.parent == folder]


def _checked(path: Path, table: object) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise PolicyError(f"{path}: tool.attnplug", table, "must be a table", "write [tool.attnplug]")
    read: dict[str, Any] = {}
    for key, value in table.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(key.lower().replace("_", "-"), _KEYS, 1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(_KEYS)}"
            raise PolicyError(f"{path}: tool.attnplug.{key}", value, "is an unknown key", remedy)
        form, convert = _KEYS[key]
        read[key] = convert(value, path.parent)
        if read[key] is None:
            raise PolicyError(f"{path}: tool.attnplug.{key}", value, f"must be {form}")
    return read


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _rules(value: Any, folder: Path) -> Any:
    is_table = isinstance(value, dict) and bool(value) and all(map(_is_text, value.values()))
    return value if _is_text(value) or is_table else None


def _tables(value: Any, folder: Path) -> Any:
    if not isinstance(value, dict) or not all(isinstance(each, dict) for each in value.values()):
        return None
    return {name: {key: as_tuples(each) for key, each in table.items()} for name, table in value.items()}


def _names(value: Any, folder: Path) -> str | None:
    is_list = isinstance(value, list) and all(_is_text(each) and "," not in each for each in value)
    return ",".join(value) if is_list else None


def _flag(value: Any, folder: Path) -> str | None:
    return str(int(value)) if isinstance(value, bool) else None


def _files(value: Any, folder: Path) -> str | None:
    is_list = isinstance(value, list) and all(_is_text(each) and os.pathsep not in each for each in value)
    return os.pathsep.join(str(folder / os.path.expanduser(each)) for each in value) if is_list else None  # noqa: PTH111


def _layout(value: Any, folder: Path) -> str | None:
    return value if value in ("NHD", "HND") else None


_KEYS: Mapping[str, tuple[str, Callable[[Any, Path], Any]]] = {
    "backend": ("a backend's name, rules such as 'TORCH,sliding=TRITON', or a table of rules", _rules),
    "options": ("a table of options for each backend, such as [tool.attnplug.options.TRITON]", _tables),
    "known-failures": (
        "a table of id = reason for each backend, such as [tool.attnplug.known-failures.TRITON]",
        _tables,
    ),
    "plugins": ("a list of plugins", _names),
    "block-plugins": ("a list of plugins", _names),
    "rank": ("a list of plugins", _names),
    "strict": ("true or false", _flag),
    "allow-refuted": ("a list of backends, or ['all']", _names),
    "tuned": ("a list of files of attnplug tune", _files),
    "kv-cache-layout": ("'NHD' or 'HND'", _layout),
}
"""By key: the form of a value, and a function that gives it as it is used, or None."""


def read_toml_text(path: Path, source: str) -> str:
    """The text of a small file; PolicyError, with the option or file `source`, if it cannot be read."""
    try:
        return files.read_text(path, _MOST_BYTES)
    except (OSError, UnicodeDecodeError) as problem:
        why = files.why(problem) if isinstance(problem, OSError) else "it is not UTF-8 text"
        raise PolicyError(source, str(path), f"cannot be read: {why}") from None


def read_toml(path: Path, source: str, text: str) -> dict[str, Any]:
    """The tables in the text of a file; PolicyError, with the option or file `source`, if it is not TOML."""
    import tomllib

    try:
        return tomllib.loads(text)
    # Besides its own error, tomllib raises these for too long integers and too deep nesting.
    except (ValueError, RecursionError) as problem:
        raise PolicyError(source, str(path), f"is not TOML: {problem}") from None
