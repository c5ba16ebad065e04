"""Loads a PreTrainedConfig from a local path, with an error for each possible fault.

transformers keeps values of a wrong type as they are, and makes an object for each layer, expert and label.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from attnplug._system.text import shown
from attnplug.core.checks import short_number
from attnplug.core.errors import ModelConfigError
from attnplug.integrations.model_spec import OWN_SPECS
from attnplug.integrations.reader.architecture import with_known_types
from attnplug.integrations.reader.config_json import config_path, one_line, parse
from attnplug.integrations.reader.config_parts import parts_of
from attnplug.integrations.reader.sizes_in_file import sizes_checked

_LIMITS = (
    (re.compile(r"(layers?|depths?|blocks|stages|levels|repeats?|repeat_times)$"), 1024),
    (re.compile(r"(heads|experts|codebooks|quantizers|groups|streams|adapters)$"), 1 << 16),
    (re.compile(r"(position_embeddings|n_positions|n_ctx)$|max_(source|target)_positions"), 1 << 24),
    # Numbers about the training are notes, from which nothing is built.
    (re.compile(r"^(num|n)_(?!.*(param|train|step|sample|flop|token))"), 1 << 20),
)
"""The largest number under a name, by the first pattern that the name matches."""
# Attributes of transformers' classes about the fields. An entry of a file would replace them.
_OF_CLASSES: Final = frozenset({"sub_configs", "attribute_map"})
_NUMBERS: Final = ("sliding_window", "max_source_positions")
_LISTS: Final = ("layer_types", "layers_block_type", "attn_type_list", "architectures")


def load_config(
    source: str | os.PathLike[str] | PreTrainedConfig,
) -> tuple[PreTrainedConfig, tuple[str, ...]]:
    """The configuration in `source`, or `source` itself, with notes on families found by `architectures` and lacking sizes.

    ModelConfigError if it cannot be read.
    """
    if isinstance(source, PreTrainedConfig):
        if not source.model_type:
            raise ModelConfigError(
                f"{type(source).__name__} has no model_type, so no model class belongs to it"
            )
        _check_types(source)
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
    _check_entries(str(path), data)
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
    _check_types(config)
    return config, (*notes, *sizes_checked(path, data, config))


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


def _walk(source: str, data: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, bool]]:
    """Place, name and value of each entry, and whether all objects around it are configurations."""
    # A stack, because a file may be nested as deeply as the parser of JSON allows.
    rest = [(f"{source}: ", data, True)]
    while rest:
        before, part, in_configs = rest.pop()
        for name, value in part.items():
            yield f"{before}{name}", str(name), value, in_configs
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, Mapping):
                    is_config = each is value and str(name).endswith("_config")
                    rest.append((f"{before}{name}.", each, in_configs and is_config))


def check_numbers(source: str, data: Mapping[str, Any]) -> None:
    """ModelConfigError, which names `source`, for a number that makes transformers build more than any model has."""
    for place, name, value, _ in _walk(source, data):
        for one in value if isinstance(value, (list, tuple)) else (value,):
            _check_number(place, name, one)


def _check_number(place: str, name: str, value: object) -> None:
    most = next((most for pattern, most in _LIMITS if pattern.search(name)), None)
    # Floats too, because a family may make an integer of 1e30. NaN and infinity are no counts.
    if (
        most is None
        or isinstance(value, bool)
        or not isinstance(value, (int, float))
        or -most <= value <= most
    ):
        return
    found = short_number(value) if isinstance(value, int) else value
    raise ModelConfigError(
        f"{place}={found}: must be at most {most}; the model is built without weights to read it",
        unreadable=True,
    )


def _check_entries(source: str, data: Mapping[str, Any]) -> None:
    """ModelConfigError for an entry of a wrong type, or one that would replace an attribute of the class."""
    for place, name, value, in_configs in _walk(source, data):
        if not in_configs:
            continue
        if name in _OF_CLASSES or callable(getattr(PreTrainedConfig, name, None)):
            raise ModelConfigError(
                f"{place}={shown(value, 40)}: is no field, but an attribute of transformers' "
                "configuration classes; remove it"
            )
        _check_value(place, name, value)


def _check_types(config: PreTrainedConfig) -> None:
    """ModelConfigError for a part that is not a configuration, and for a value of a type that no layer can have."""
    for before, part in parts_of(config):
        # Layers' modules have other sizes of their own, such as the larger heads of Gemma 4. These fields are none of modules.
        varying = getattr(vars(part).get("_heterogeneity_spec"), "per_layer_attributes", ())
        for name in (*_NUMBERS, *_LISTS):
            if name in varying:
                raise ModelConfigError(
                    f"{before}per_layer_config has values of single layers for {name}; this reader takes one for all layers; {OWN_SPECS}"
                )
            _check_value(f"{before}{name}", name, getattr(part, name, None))


def _check_value(place: str, name: str, value: object) -> None:
    if value is None:
        return
    if name in _NUMBERS and not isinstance(value, (int, float)):
        remedy = "; where layers differ, layer_types says which of them have the window"
        raise ModelConfigError(
            f"{place}={shown(value, 80)}: must be one number of tokens"
            f"{remedy if name == 'sliding_window' else ''}"
        )
    if name in _LISTS and not isinstance(value, (list, tuple)):
        raise ModelConfigError(f"{place}={shown(value, 80)}: must be a list")


# The settings belong to the process, so of several blocks the first changes them and the last restores them.
_LOCK, _BLOCKS, _SETTINGS = threading.Lock(), list[None](), contextlib.ExitStack()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No warnings and no log lines of transformers inside the block; restores the settings after it."""
    with _LOCK:
        if not _BLOCKS:
            _SETTINGS.callback(transformers.logging.set_verbosity, transformers.logging.get_verbosity())
            transformers.logging.set_verbosity(logging.CRITICAL)
            _SETTINGS.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        _BLOCKS.append(None)
    try:
        yield
    finally:
        with _LOCK:
            _BLOCKS.pop()
            if not _BLOCKS:
                _SETTINGS.close()
