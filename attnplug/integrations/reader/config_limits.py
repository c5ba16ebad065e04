"""Limits of the numbers in a model configuration: transformers makes an object for each layer, expert and label."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

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
