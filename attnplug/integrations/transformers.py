"""Hugging Face models: attnplug as their attention, and their configurations read into LayerSpecs.

To read one, nothing is looked up by the model's name: the modelling class is built without weights, run once on
torch's meta device, and every call it makes to attention is recorded and checked.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attnplug.core.dtypes import kv_cache_dtype_name
from attnplug.core.errors import ModelConfigError, SpecError
from attnplug.core.spec import LayerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from attnplug.integrations.attention.registration import (
        attention_decisions as attention_decisions,
    )
    from attnplug.integrations.attention.registration import (
        register as register,
    )
    from attnplug.integrations.attention.registration import (
        set_attention as set_attention,
    )

__all__ = ["ModelSpec", "attention_decisions", "read_config", "register", "set_attention"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The layers of one model, per tensor-parallel rank.

    `layers` has one entry per attention layer, in the order in which the model runs them, under the
    module path that Hugging Face gives it (`model.layers.0.self_attn`; a module that runs several times
    gets `#2`, `#3`, ... appended). `other_layers` names what keeps no attention KV, with its kind
    ("mamba", "linear_attention", "vision encoder", ...). `kv_sharing` maps a layer to the layer whose
    keys and values it reads. `name` is the model class; `model_type` is transformers' name of the family.
    """

    layers: Mapping[str, LayerSpec]
    other_layers: Mapping[str, str]
    kv_sharing: Mapping[str, str]
    model_type: str
    name: str

    def __post_init__(self) -> None:
        for field in ("layers", "other_layers", "kv_sharing"):
            object.__setattr__(self, field, MappingProxyType(dict(getattr(self, field))))

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        fields = (dict(self.layers), dict(self.other_layers), dict(self.kv_sharing))
        return _rebuild, (*fields, self.model_type, self.name)


def _rebuild(
    layers: Mapping[str, LayerSpec],
    other_layers: Mapping[str, str],
    kv_sharing: Mapping[str, str],
    model_type: str,
    name: str,
) -> ModelSpec:
    return ModelSpec(
        layers=layers, other_layers=other_layers, kv_sharing=kv_sharing, model_type=model_type, name=name
    )


def read_config(
    path_or_config: str | os.PathLike[str] | PreTrainedConfig,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
) -> ModelSpec:
    """The attention layers that a model configuration asks for, per tensor-parallel rank.

    Args:
        path_or_config: a `config.json`, a folder that holds one, or a `PreTrainedConfig`. The network is
            never used and no remote code is run. The object given is not changed.
        tensor_parallel_size: ranks that the heads are divided among; KV heads fewer than ranks are
            replicated, so that every rank has at least one.
        kv_cache_dtype: storage of the KV cache of layers that keep a paged one; encoder layers, whose
            keys and values come with the call, stay "auto".

    A configuration that names no dtype is read as bfloat16, LayerSpec's own default: the dtype would be
    that of the checkpoint, which is not at hand.

    `scale` is the whole factor between `query @ key` and the logits, whether the model multiplies its
    queries by it or leaves it to attention.

    Raises:
        ModelConfigError: the file cannot be read, transformers cannot build the model, the heads do not
            divide, or a layer asks for attention that no LayerSpec can say (the message says which).
    """
    if isinstance(tensor_parallel_size, bool) or not isinstance(tensor_parallel_size, int):
        raise ModelConfigError(f"tensor_parallel_size={tensor_parallel_size!r}: must be an integer")
    if tensor_parallel_size < 1:
        raise ModelConfigError(f"tensor_parallel_size={tensor_parallel_size}: must be at least 1")
    try:
        cache_dtype = kv_cache_dtype_name(kv_cache_dtype)
    except SpecError as error:
        raise ModelConfigError(str(error)) from error
    try:
        import transformers as _  # noqa: F401
    except ImportError as error:
        raise ModelConfigError(
            "reading a model configuration needs transformers; pip install 'attnplug[models]'"
        ) from error
    from attnplug.integrations.reader.config_file import load_config
    from attnplug.integrations.reader.model_reading import read_model

    config = load_config(path_or_config)
    reading = read_model(config, tensor_parallel_size, cache_dtype)
    return ModelSpec(
        layers=reading.layers,
        other_layers=reading.other_layers,
        kv_sharing=reading.kv_sharing,
        model_type=str(config.model_type),
        name=reading.class_name,
    )


def __getattr__(name: str) -> Any:
    # Registering needs torch and transformers, which whoever only reads ModelSpecs need not have.
    if name not in ("attention_decisions", "register", "set_attention"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attnplug.integrations.attention import registration

    return getattr(registration, name)
