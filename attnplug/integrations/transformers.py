"""Hugging Face models: attnplug as their attention, and LayerSpecs read from their configurations.

The reader has no table of model names. It builds the modelling class without weights, runs it once on torch's
meta device, and records and checks every call to attention.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attnplug.core.dtypes import kv_cache_dtype_name
from attnplug.core.errors import ModelConfigError, SpecError
from attnplug.core.spec import LayerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from attnplug.integrations.attention.registration import attention_decisions, register, set_attention

__all__ = ["ModelSpec", "attention_decisions", "read_config", "register", "set_attention"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The layers of one model, per tensor-parallel rank.

    `layers` has one entry per attention layer, by module path (`model.layers.0.self_attn`), in the order that
    the model runs them. Further runs of the same module get `#2`, `#3`, ... appended. `other_layers` gives the
    kind of each part without attention KV ("mamba", "linear_attention", "vision encoder", ...). `kv_sharing`
    maps a layer to the layer whose keys and values it reads. `name` is the model class; `model_type` is
    transformers' name of the family.
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
        # Mapping proxies cannot be pickled.
        mappings = {field: dict(getattr(self, field)) for field in ("layers", "other_layers", "kv_sharing")}
        make = functools.partial(ModelSpec, **mappings, model_type=self.model_type, name=self.name)
        return make, ()


def read_config(
    path_or_config: str | os.PathLike[str] | PreTrainedConfig,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
) -> ModelSpec:
    """The attention layers that a model configuration asks for, per tensor-parallel rank.

    Args:
        path_or_config: a `config.json`, its folder, or a `PreTrainedConfig`. The reader never uses the network,
            runs no remote code and does not change the object.
        tensor_parallel_size: ranks that divide the heads. Fewer KV heads than ranks are replicated, so that
            every rank has at least one.
        kv_cache_dtype: storage of paged KV caches. Encoder layers, which receive keys and values with the
            call, keep "auto".

    A configuration without a dtype is read as bfloat16, LayerSpec's default, because the checkpoint that
    determines it is not read.

    `scale` is the whole factor between `query @ key` and the logits, including one that the model applies to
    its queries.

    Raises:
        ModelConfigError: the file cannot be read, transformers cannot build the model, the ranks do not divide
            the heads, or a LayerSpec cannot describe a layer's attention (the message names it).
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

    return read_model(load_config(path_or_config), tensor_parallel_size, cache_dtype)


def __getattr__(name: str) -> Any:
    # Registering imports torch and transformers, which users of ModelSpec alone may not have installed.
    if name not in ("attention_decisions", "register", "set_attention"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attnplug.integrations.attention import registration

    return getattr(registration, name)
