"""The sizes that a file must have: a default of transformers describes a model of another size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedConfig

from attnplug._system.text import shown
from attnplug.core.errors import ModelConfigError
from attnplug.integrations.reader.config_parts import parts_of

_SIZES: Final = {"num_hidden_layers": ("num_layers",), "num_attention_heads": (), "hidden_size": ()}
"""The sizes, with fields of a class beside the usual one from which its model takes them."""

_OTHERS: Final = ("num_key_value_heads", "head_dim", "sliding_window")
"""Fields that a file with the sizes of its text outside their part has there too."""


def sizes_checked(path: Path, data: Mapping[str, Any], config: PreTrainedConfig) -> tuple[str, ...]:
    """A note on the sizes that the parts of a model have from transformers, since the file lacks them.

    ModelConfigError: the file of a model without parts lacks a size, the file of another model has neither a size
    nor a part, or no part for the text, or it has a size of the text where no class reads it.
    """
    if not config.sub_configs:
        for stored, _ in _lacking(config, data):
            raise ModelConfigError(
                f"{path}: this {data['model_type']} configuration lacks the field {stored}"
            )
        return ()
    text = config.get_text_config()
    lacking: list[tuple[str, Any]] = []
    is_empty = True
    for place, part in parts_of(config):
        count = len(list(_sizes(part)))
        if count < 2:
            continue  # no stack of layers, such as the experts of DBRX
        given = _given(data, place)
        without = list(_lacking(part, given or {}))
        # save_pretrained leaves out what equals a default, which may be all sizes of a part.
        if given is not None and (place or len(without) < count):
            is_empty = False
        if part is text and place and without:
            without = list(_outside(path, data, place, config, given, without))
        lacking += [(f"{place}{stored}", value) for stored, value in without]
    if not lacking:
        return ()
    if is_empty:
        raise ModelConfigError(
            f"{path}: this {data['model_type']} configuration lacks the field {lacking[0][0]}"
        )
    names = ", ".join(f"{place}={shown(value, 40)}" for place, value in lacking)
    return (f"the file lacks sizes, for which transformers' defaults were read: {names}",)


def _outside(
    path: Path,
    data: Mapping[str, Any],
    place: str,
    config: PreTrainedConfig,
    given: object,
    without: list[tuple[str, Any]],
) -> Iterator[tuple[str, Any]]:
    """The sizes that the text's part lacks and that are not beside it either, where older files have them."""
    beside = False
    default, text = type(config)(), config.get_text_config()
    others = ((name, getattr(text, name, None)) for name in _OTHERS if given is None and hasattr(text, name))
    for stored, value in (*without, *others):
        # Some classes have a size of their own under the name, such as the sum of the layers of all parts.
        is_own = hasattr(default, stored) and data.get(stored) != value
        if stored not in data or is_own:
            if stored not in _OTHERS:
                yield stored, value
            continue
        beside = True
        if data[stored] != value:
            raise ModelConfigError(
                f"{path}: {stored}={shown(data[stored], 40)} is not read outside {place[:-1]}, which has transformers' default "
                f"{shown(value, 40)}; move it into {place[:-1]}"
            )
    if given is None and not beside:
        raise ModelConfigError(f"{path}: this {data['model_type']} configuration lacks the part {place[:-1]}")


def _given(data: Mapping[str, Any], place: str) -> Mapping[str, Any] | None:
    found: Any = data
    for name in filter(None, place.split(".")):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _sizes(part: PreTrainedConfig) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The sizes of `_SIZES` that a configuration stores, each with the name of its field and of others."""
    for name, others in _SIZES.items():
        if hasattr(part, name) and not isinstance(getattr(type(part), name, None), property):
            yield name, part.attribute_map.get(name, name), others


def _lacking(part: PreTrainedConfig, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of sizes that `given` lacks and that have the class's default, with this default."""
    default: Any = type(part)()
    for name, stored, others in _sizes(part):
        names = {name, stored, *(other for other in others if hasattr(default, other))}
        value = getattr(part, name)
        if not names & set(given) and value == getattr(default, name, None):
            yield stored, value
