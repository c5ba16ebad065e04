"""Refuses values of a wrong type in a configuration, which transformers keeps as they are and the reader computes with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from transformers import PreTrainedConfig

from attnplug._system.text import shown
from attnplug.core.errors import ModelConfigError

_OF_CLASSES: Final = frozenset({"sub_configs", "attribute_map"})
"""Attributes of transformers' classes about the fields. An entry of a file would replace them."""
_NUMBERS: Final = ("sliding_window", "max_source_positions")
_LISTS: Final = ("layer_types", "layers_block_type", "attn_type_list", "architectures")


def check_entries(source: str, data: Mapping[str, Any]) -> None:
    """ModelConfigError for an entry of a wrong type, or one that would replace an attribute of the class.

    Args:
        source: for the message.
        data: the JSON object of a configuration; configurations inside it are checked too.
    """
    rest: list[tuple[str, Mapping[str, Any]]] = [(f"{source}: ", data)]
    while rest:
        before, part = rest.pop()
        for name, value in part.items():
            if name in _OF_CLASSES or callable(getattr(PreTrainedConfig, name, None)):
                raise ModelConfigError(
                    f"{before}{name}={shown(value, 40)}: is no field, but an attribute of transformers' "
                    "configuration classes; remove it"
                )
            _check_value(before, name, value)
            if isinstance(value, Mapping) and name.endswith("_config"):
                rest.append((f"{before}{name}.", value))


def check_types(config: PreTrainedConfig) -> None:
    """ModelConfigError for a part that is no configuration, and for a value of a type that no layer can have."""
    for before, part in _parts(config):
        for name in (*_NUMBERS, *_LISTS):
            _check_value(before, name, getattr(part, name, None))


def _check_value(before: str, name: str, value: object) -> None:
    if value is None:
        return
    if name in _NUMBERS and not isinstance(value, (int, float)):
        remedy = "; where layers differ, layer_types says which of them have the window"
        raise ModelConfigError(
            f"{before}{name}={shown(value, 80)}: must be one number of tokens"
            f"{remedy if name == 'sliding_window' else ''}"
        )
    if name in _LISTS and not isinstance(value, (list, tuple)):
        raise ModelConfigError(f"{before}{name}={shown(value, 80)}: must be a list")


def _parts(config: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    yield before, config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from _parts(part, f"{before}{name}.")
        elif part is not None and not isinstance(part, Mapping):
            raise ModelConfigError(
                f"{before}{name}={shown(part, 40)}: must be an object with the configuration of that part"
            )
