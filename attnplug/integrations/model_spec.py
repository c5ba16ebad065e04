"""The layers of one model, as a value.

The LayerSpec of one rank. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from attnplug.core.errors import ModelConfigError, SpecError
from attnplug.core.spec import LayerSpec

NOT_READ: Final = ", not read: "
"""It is in `other_layers`, between the kind of a part whose attention was not read, and the reason."""

OWN_SPECS: Final = "describe its layers by LayerSpecs of your own, which attnplug.plan takes; `attnplug explain` shows what serves one"
"""The remedy for a model that cannot be read."""


def family_note(place: str, version: str, family: str, cls: str) -> str:
    """A sentence for a model type, in `place`, that transformers lacks and that is read as another one."""
    return (
        f"{place} is unknown to transformers {version}; it is read as {family!r}, the family of {cls} in its "
        "architectures, and code of its own was not run"
    )


class Client(enum.StrEnum):
    """The program that runs a model with attnplug's backends."""

    ENGINE = "engine"
    """An engine that keeps keys and values in pages."""
    TRANSFORMERS = "transformers"
    """transformers with `attn_implementation="attnplug"`: its own caches give each call the keys and values."""


_MAPPINGS = ("layers", "other_layers", "kv_sharing", "index_keys")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The layers of one model, per tensor-parallel rank.

    `layers` has one entry per attention layer, by module path (`model.layers.0.self_attn`), in the order that
    the model runs them; layers of image and audio towers that a run on text does not reach come last. Further
    runs of the same module get `#2`, `#3`, ... appended. `other_layers` gives the kind of each part without
    attention KV, such as "mamba", "linear_attention" or "conv". It also has each part whose attention was not
    read, with the reason ("vision encoder, not read: ..."); `unread` has these alone. `kv_sharing`
    maps a layer to the layer whose keys and values it reads. `name` is the model class; `model_type` is
    transformers' name of the family. `notes` are sentences about what the configuration says and the layers do not
    show, such as a field that nothing reads. `index_keys` gives the elements that the indexer of a sparse layer
    keeps for each token beside the KV cache; layers that use another layer's choice have no entry.
    """

    layers: Mapping[str, LayerSpec]
    other_layers: Mapping[str, str]
    kv_sharing: Mapping[str, str]
    model_type: str
    name: str
    notes: tuple[str, ...] = ()
    index_keys: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for field in _MAPPINGS:
            object.__setattr__(self, field, MappingProxyType(dict(getattr(self, field))))

    @property
    def unread(self) -> Mapping[str, str]:
        """The reason for each part whose attention was not read, by module path."""
        parts = {path: kind.partition(NOT_READ) for path, kind in self.other_layers.items()}
        return {path: reason for path, (_, mark, reason) in parts.items() if mark}

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        # Mapping proxies cannot be pickled.
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        fields |= {field: dict(fields[field]) for field in _MAPPINGS}
        return functools.partial(ModelSpec, **fields), ()


def make_spec(path: str, *, num_heads: int, num_kv_heads: int, ranks: int, **fields: Any) -> LayerSpec:
    """A spec with the heads divided among `ranks`; fewer KV heads than ranks are replicated."""
    if num_heads % ranks:
        near = min(
            (each for each in range(1, num_heads + 1) if num_heads % each == 0),
            key=lambda each: abs(each - ranks),
        )
        raise ModelConfigError(
            f"{path}: tensor_parallel_size={ranks} does not divide the {num_heads} attention heads; "
            f"use one that does, such as {near}",
            argument="tensor_parallel_size",
        )
    few, many = sorted((num_kv_heads, ranks))
    if many % few:
        raise ModelConfigError(
            f"{path}: tensor_parallel_size={ranks} and the {num_kv_heads} KV heads must divide one another",
            argument="tensor_parallel_size",
        )
    try:
        return LayerSpec(num_heads=num_heads // ranks, num_kv_heads=max(1, num_kv_heads // ranks), **fields)
    except SpecError as error:
        raise ModelConfigError(f"{path}: {error}") from error
