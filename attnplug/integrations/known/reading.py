"""Reads a model by the rule of its type, if the rule understands every field of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final

from attnplug.integrations.known.decoders import DECODERS
from attnplug.integrations.known.fields import Family, dtype_of
from attnplug.integrations.known.others import OTHERS
from attnplug.integrations.model_spec import Client, ModelSpec, family_note

FAMILIES: Final[Mapping[str, Family]] = {**DECODERS, **OTHERS}
"""The rules by model type."""
ALIKE: Final = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers does not have, by the type whose class their `architectures` name."""
# The transformers whose classes the rules follow. The tests compare the installed one with every rule.
_VERSION: Final = "5."


def read_known(data: Mapping[str, Any], ranks: int, kv_cache_dtype: str, client: Client) -> ModelSpec | None:
    """The layers of a configuration, equal to those that the full reader finds; None without a rule for it.

    Args:
        data: the JSON object of a config.json. A field or a value that the rule does not understand gives None.
        ranks: ranks that divide the heads.
        kv_cache_dtype: storage of paged KV caches.
        client: the program that runs the model.

    Raises:
        ModelConfigError: the ranks do not divide the heads.
    """
    model_type = data.get("model_type")
    if not isinstance(model_type, str):
        return None
    known = ALIKE.get(model_type, model_type)
    family = FAMILIES.get(known)
    if known != model_type and not data.get("architectures"):
        return None  # without the name of a class, nothing says that it is alike
    if family is None or client not in family.clients or not (_installed() or _VERSION).startswith(_VERSION):
        return None
    if not _understands(family, data):
        return None
    name = (data.get("architectures") or [next(iter(family.classes))])[0]
    if name not in family.classes:
        return None
    values = {**family.defaults, **data, "model_type": known}
    layers = family.read(values)
    if layers is None:
        return None
    notes: tuple[str, ...] = ()
    if known != model_type:
        notes = (family_note(f"model_type {model_type!r}", _installed() or f"{_VERSION}x", known, name),)
    by_path = {f"{family.classes[name]}{path}": each for path, each in layers}
    return ModelSpec(
        layers={
            path: each.spec(path, ranks, dtype_of(data), kv_cache_dtype, client)
            for path, each in by_path.items()
        },
        other_layers={},
        kv_sharing={},
        model_type=model_type,
        name=name,
        notes=notes,
        index_keys={
            path: int(values.get("index_head_dim") or 0)
            for path, each in by_path.items()
            if each.sparse is not None
        },
    )


def _understands(family: Family, data: Mapping[str, Any]) -> bool:
    for name, value in data.items():
        check = family.fields.get(name)
        if check is None or not check(value):
            return False
    if any(data.get(name) is None for name in family.required):
        return False
    padding = data.get("pad_token_id")
    # torch's embedding refuses a padding token outside the vocabulary.
    return padding is None or padding < data.get("vocab_size", 0)


def _installed() -> str | None:
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None
