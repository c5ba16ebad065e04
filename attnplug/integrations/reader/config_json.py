"""Reads the JSON object of a config.json. Imports neither torch nor transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from attnplug._system import files
from attnplug._system.json_files import parse_json
from attnplug.core.errors import ModelConfigError

_MOST_BYTES = 16 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.json)")
_WEIGHTS = frozenset({".safetensors", ".bin", ".gguf", ".pt", ".pth"})


def config_path(path: Path) -> Path:
    """`path` itself, the config.json of a folder, or that of a hub's id in the local cache.

    ModelConfigError for a missing file, and for one of weights.
    """
    if files.is_folder(path):
        if not files.has_name(path / "config.json"):
            raise ModelConfigError(f"{path}: the folder has no config.json", unreadable=True)
        return path / "config.json"
    if path.suffix in _WEIGHTS:
        raise ModelConfigError(f"{path}: a file of weights; give the config.json beside it", unreadable=True)
    if files.has_name(path):  # what lies behind a link is read, or named, later
        return path
    if not _HUB_ID.fullmatch(path.as_posix()):
        raise ModelConfigError(
            f"{path}: no such file; give the path of a config.json (nothing is downloaded)", unreadable=True
        )
    if (cached := _in_hub_cache(path.as_posix())) is not None:
        return cached
    raise ModelConfigError(
        f"{path}: no such file, and no model of the local hub cache (nothing is downloaded); to get its "
        f"configuration alone, run: hf download {path.as_posix()} config.json",
        unreadable=True,
    )


def _in_hub_cache(name: str) -> Path | None:
    """The config.json that `huggingface_hub` keeps for a model; it asks no server."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # not installed, or a name that no hub takes
        return None
    return Path(found) if isinstance(found, str) else None


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
        raise ModelConfigError(
            f"{path}: not JSON: {one_line(error)}; give a model's config.json", unreadable=True
        ) from error
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
