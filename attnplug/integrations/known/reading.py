"""Reads a model by the rule of its type, if the rule understands every field of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any, Final

from attnplug.integrations.known.decoders import DECODERS
from attnplug.integrations.known.fields import Family, dtype_of
from attnplug.integrations.known.latent import LATENT
from attnplug.integrations.known.others import OTHERS
from attnplug.integrations.model_spec import Client, ModelSpec, family_note

FAMILIES: Final[Mapping[str, Family]] = {**DECODERS, **LATENT, **OTHERS}
"""The rules by model type."""
_ALIKE: Final = {"kimi_k2": "deepseek_v3"}
"""Model types that transformers does not have, by the type whose class their `architectures` name."""
_VERSION: Final = "5."
"""The transformers whose classes the rules follow. The tests compare the installed one with every rule."""


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
    family = FAMILIES.get(_ALIKE.get(model_type, model_type))
    if model_type in _ALIKE and not data.get("architectures"):
        return None  # without the name of a class, nothing says that it is alike
    if family is None or client not in family.clients or not _version_fits():
        return None
    if not _understands(family, data):
        return None
    name = (data.get("architectures") or [next(iter(family.classes))])[0]
    if name not in family.classes:
        return None
    layers = family.read({**family.defaults, **data, "model_type": _ALIKE.get(model_type, model_type)})
    if layers is None:
        return None
    before, dtype = family.classes[name], dtype_of(data)
    layers = list(layers)
    sparse = [f"{before}{path}" for path, each in layers if each.sparse is not None]
    return ModelSpec(
        layers={
            f"{before}{path}": each.spec(f"{before}{path}", ranks, dtype, kv_cache_dtype, client)
            for path, each in layers
        },
        other_layers={},
        kv_sharing={},
        model_type=model_type,
        name=name,
        notes=_family_notes(model_type, name),
        index_keys=dict.fromkeys(sparse, int({**family.defaults, **data}.get("index_head_dim") or 0)),
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


def _family_notes(model_type: str, cls: str) -> tuple[str, ...]:
    alike = _ALIKE.get(model_type)
    if alike is None:
        return ()
    return (family_note(f"model_type {model_type!r}", _installed() or f"{_VERSION}x", alike, cls),)


def _version_fits() -> bool:
    """Whether the installed transformers is one that the rules follow, or none is installed."""
    version = _installed()
    return version is None or version.startswith(_VERSION)


def _installed() -> str | None:
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None
