"""Reads the JSON object of a config.json. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnplug._system import files
from attnplug._system.json_files import parse_json
from attnplug.core.errors import ModelConfigError

_MOST_BYTES = 16 << 20


def config_path(path: Path) -> Path:
    """`path` itself, or the config.json of a folder. ModelConfigError for a missing file."""
    if files.is_folder(path):
        if not files.has_name(path / "config.json"):
            raise ModelConfigError(f"{path}: the folder has no config.json", unreadable=True)
        return path / "config.json"
    if not files.has_name(path):  # what lies behind a link is read, or named, later
        raise ModelConfigError(
            f"{path}: no such file; give the path of a config.json (nothing is downloaded)", unreadable=True
        )
    return path


def parse(path: Path) -> dict[str, Any]:
    """The JSON object in a file. ModelConfigError if the file cannot be read or has no object."""
    try:
        text = files.read_text(path, _MOST_BYTES)
    except OSError as error:
        raise ModelConfigError(f"{path}: cannot be read: {files.why(error)}", unreadable=True) from error
    except UnicodeDecodeError as error:
        raise ModelConfigError(
            f"{path}: cannot be read as text: {one_line(error)}", unreadable=True
        ) from error
    if not text.strip():
        raise ModelConfigError(
            f"{path}: the file is empty; a model configuration is a JSON object", unreadable=True
        )
    try:
        # transformers writes Infinity for limits of some families, such as Mamba's time steps.
        data = parse_json(text, strict=False)
    except ValueError as error:
        raise ModelConfigError(f"{path}: not JSON: {one_line(error)}", unreadable=True) from error
    if not isinstance(data, dict):
        kind = {list: "list", str: "string", type(None): "null", bool: "boolean"}.get(type(data), "number")
        raise ModelConfigError(
            f"{path}: contains a JSON {kind}; a model configuration is a JSON object", unreadable=True
        )
    return data


def one_line(error: BaseException, limit: int = 240) -> str:
    """The message of `error` as a single line of at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):  # its message is the key alone
        text = f"KeyError: {text}"
    return text if len(text) <= limit else text[: limit - 3] + "..."
