"""Loads a PreTrainedConfig from a local path, with an error for each possible fault.

Also silences transformers' advice, and shortens its errors to one line.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from attnplug.core.errors import ModelConfigError
from attnplug.integrations.model_spec import OWN_SPECS
from attnplug.integrations.reader.architecture import with_known_types
from attnplug.integrations.reader.config_json import config_path, one_line, parse
from attnplug.integrations.reader.config_limits import check_entries, check_numbers, check_types

_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size")
_OTHER_NAMES = {"num_hidden_layers": ("num_layers",)}
"""Fields of a class beside the usual one, from which its model takes the size."""


def load_config(source: str | os.PathLike[str] | PreTrainedConfig) -> PreTrainedConfig:
    """The configuration in `source`, or `source` itself. ModelConfigError if it cannot be read."""
    return load_with_notes(source)[0]


def load_with_notes(
    source: str | os.PathLike[str] | PreTrainedConfig,
) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    """`load_config`, and a note for each family that was found by the `architectures` of the file."""
    if isinstance(source, PreTrainedConfig):
        if not source.model_type:
            raise ModelConfigError(
                f"{type(source).__name__} has no model_type, so no model class belongs to it"
            )
        check_types(source)
        check_numbers(type(source).__name__, source.to_dict())
        return source, ()
    if not isinstance(source, (str, os.PathLike)):
        raise ModelConfigError(
            f"a path or a PreTrainedConfig is needed, not {type(source).__name__}; "
            "transformers.AutoConfig makes one from a dictionary"
        )
    path = config_path(Path(source))
    data, notes = with_known_types(parse(path))
    _check_model_type(path, data)
    check_numbers(str(path), data)
    check_entries(str(path), data)
    try:
        with quiet_transformers():
            # The reader must neither use the network nor run code from a model's folder.
            config: PreTrainedConfig = (
                CONFIG_MAPPING[data["model_type"]].from_dict(data)
                if notes
                else AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            )
    except Exception as error:
        raise ModelConfigError(
            f"{path}: transformers {transformers.__version__} cannot read this "
            f"{data['model_type']} configuration: {one_line(error)}",
            unreadable=True,
        ) from error
    check_types(config)
    _check_sizes(path, data, config)
    return config, notes


def _check_model_type(path: Path, data: dict[str, Any]) -> None:
    for part in ("text_config", "vision_config", "audio_config"):
        if not isinstance(data.get(part), (dict, type(None))):
            found = f"has {part}={data[part]!r}, which must be an object, the configuration of that part"
            raise ModelConfigError(f"{path}: {found}", unreadable=True)
    name = data.get("model_type")
    if not isinstance(name, str) or not name:
        found = "has no field model_type" if name is None else f"has model_type={name!r}, not a name"
        raise ModelConfigError(
            f'{path}: {found}; it names the family, as in "model_type": "llama"', unreadable=True
        )
    if name not in CONFIG_MAPPING:
        near = difflib.get_close_matches(name, list(CONFIG_MAPPING), n=3)
        meant = f"near names are {', '.join(near)}; " if near else ""
        raise ModelConfigError(
            f"{path}: model_type {name!r} is unknown to transformers {transformers.__version__}; {meant}"
            "a newer transformers may know it, and models of remote code cannot be read; if its attention is that of "
            'a family that transformers has, set model_type to that family, as in "model_type": "llama"; else '
            f"{OWN_SPECS}"
        )


def _check_sizes(path: Path, data: dict[str, Any], config: PreTrainedConfig) -> None:
    """Refuse a file without a size: the family's default would describe a model of another size."""
    if config.sub_configs:
        return
    default = type(config)()
    for name in _SIZES:
        stored = config.attribute_map.get(name, name)
        given = {name, stored, *(other for other in _OTHER_NAMES.get(name, ()) if hasattr(default, other))}
        if given & set(data) or isinstance(getattr(type(config), name, None), property):
            continue
        if hasattr(config, name) and getattr(config, name) == getattr(default, name, None):
            raise ModelConfigError(
                f"{path}: this {data['model_type']} configuration lacks the field {stored}"
            )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No warnings and no log lines of transformers inside the block; restores the settings after it."""
    _QUIET.begin()
    try:
        yield
    finally:
        _QUIET.end()


class _Quiet:
    """The settings belong to the process, so of several blocks the first changes them and the last restores them."""

    def __init__(self) -> None:
        self._lock, self._blocks, self._settings = threading.Lock(), 0, contextlib.ExitStack()

    def begin(self) -> None:
        with self._lock:
            self._blocks += 1
            if self._blocks > 1:
                return
            self._settings.callback(transformers.logging.set_verbosity, transformers.logging.get_verbosity())
            transformers.logging.set_verbosity(logging.CRITICAL)
            self._settings.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")

    def end(self) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._settings.close()


_QUIET = _Quiet()
