"""Limits of the numbers in a model configuration: transformers makes an object for each layer, expert and label.

Refuses values of a wrong type in a configuration, which transformers keeps as they are and the reader computes with.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import PreTrainedConfig

from attnplug._system.text import shown
from attnplug.core.checks import short_number
from attnplug.core.errors import ModelConfigError

_MOST_MODULES = 60_000
"""Parts of a model. DeepSeek-V3 has about 1,300, since transformers keeps the experts of a layer in one module."""
_LIMITS = (
    (re.compile(r"(layers?|depths?|blocks|stages|levels|repeats?|repeat_times)$"), 1024),
    (re.compile(r"(heads|experts|codebooks|quantizers|groups|streams|adapters)$"), 1 << 16),
    (re.compile(r"(position_embeddings|n_positions|n_ctx)$|max_(source|target)_positions"), 1 << 24),
    # Numbers about the training are notes, of which nothing is built.
    (re.compile(r"^(num|n)_(?!.*(param|train|step|sample|flop|token))"), 1 << 20),
)
"""The largest number under a name, by the first pattern that the name matches."""


def check_numbers(source: str, data: Mapping[str, Any]) -> None:
    """ModelConfigError for a number that would make transformers build more than any model has.

    Args:
        source: for the message.
        data: the JSON object of a configuration; configurations inside it are checked too.
    """
    # A stack, because a file may be nested as deeply as the parser of JSON allows.
    rest: list[tuple[str, Any]] = [(source, data)]
    while rest:
        where, value = rest.pop()
        items = value.items() if isinstance(value, Mapping) else ()
        for name, each in items:
            place = f"{where}.{name}" if where != source else f"{source}: {name}"
            if isinstance(each, Mapping):
                rest.append((place, each))
                continue
            for one in each if isinstance(each, (list, tuple)) else (each,):
                if isinstance(one, Mapping):
                    rest.append((place, one))
                else:
                    _check(place, str(name), one)


def _check(place: str, name: str, value: object) -> None:
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


@contextlib.contextmanager
def modules_limited() -> Iterator[None]:
    """Inside the block, ModelConfigError when a model gets more parts than any model that can be read."""
    count = 0

    def registered(module: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
        nonlocal count
        count += 1
        if count > _MOST_MODULES:
            raise ModelConfigError(
                f"the model has more than {_MOST_MODULES} modules; lower the numbers of layers, experts or heads"
            )

    handle = register_module_module_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


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
