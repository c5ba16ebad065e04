"""Hugging Face models: attnplug as their attention, and LayerSpecs read from their configurations.

The reader has no table of model names. It builds the modelling class without weights, runs it once on torch's
meta device, and records and checks every call to attention.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnplug._system.text import shown
from attnplug.core.checks import MOST, short_number
from attnplug.core.dtypes import dtype_name, kv_cache_dtype_name
from attnplug.core.errors import ModelConfigError, SpecError
from attnplug.integrations.model_spec import Client, ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from attnplug.integrations.attention.registration import attention_decisions, register, set_attention

__all__ = ["Client", "ModelSpec", "attention_decisions", "read_config", "register", "set_attention"]


def read_config(
    path_or_config: str | os.PathLike[str] | PreTrainedConfig,
    tensor_parallel_size: int = 1,
    kv_cache_dtype: str = "auto",
    client: Client | str = Client.ENGINE,
    dtype: str | None = None,
) -> ModelSpec:
    """The attention layers that a model configuration asks for, per tensor-parallel rank.

    Args:
        path_or_config: a `config.json`, its folder, or a `PreTrainedConfig`. The reader never uses the network,
            runs no remote code and does not change the object.
        tensor_parallel_size: ranks that divide the heads. Fewer KV heads than ranks are replicated, so that
            every rank has at least one.
        kv_cache_dtype: storage of paged KV caches; with "auto" the one that the checkpoint names, else the model's
            dtype. ModelOpt, compressed-tensors, Quark, AutoRound and AutoFP8 name it in the configuration, in one
            inside it, or in a file beside it, such as `hf_quant_config.json`. Encoder layers, which receive keys
            and values with the call, keep "auto".
        client: "engine", or "transformers" for the layers as transformers itself runs them with
            `attn_implementation="attnplug"`: each has `direct_kv=True` and the heads and scale of its call, latent
            attention has expanded keys and values, and no layer shares a cache.
        dtype: "float16", "bfloat16" or "float32" for all layers, in place of the configuration's dtype.

    A configuration without a dtype is read as bfloat16, LayerSpec's default, because the checkpoint that
    determines it is not read.

    Inputs follow from the names in the signature of the model class and the sizes in its configuration. A
    vision or audio tower that a run on text does not reach is run by itself. Layers that keep no cache have
    `direct_kv=True`: encoders, towers, text encoders with a causal mask, and cross attention outside a decoder.
    A module that folds windows or frames into its batch computes each of them as a sequence of its own.

    A class or family of remote code is read as the family of transformers that its name says. Attention that a module
    computes itself is followed by its operations and compared by numbers; code that attends otherwise in a longer text
    is refused. A part whose attention was not read has the reason in `unread`.

    `scale` is the whole factor between `query @ key` and the logits. Numbers by which the attention module multiplies
    its queries or keys are part of it, so an engine leaves them out. The reader measures it on random inputs.

    `ModelSpec.notes` names the storage that the checkpoint asks for, a family of remote code, and fields about attention
    that the model class does not read.

    Raises:
        ModelConfigError: the file cannot be read; transformers cannot build the model; the ranks do not divide the
            heads; a LayerSpec cannot describe a layer's attention or its storage (the message names it); no attention
            was read at all; the checkpoint says something about its cache that the reader does not know, or two
            different things. For transformers also: a layer computes its own attention, or attends only chosen keys.
    """
    if isinstance(tensor_parallel_size, bool) or not isinstance(tensor_parallel_size, int):
        raise ModelConfigError(f"tensor_parallel_size={tensor_parallel_size!r}: must be an integer")
    if tensor_parallel_size > MOST:
        raise ModelConfigError(
            f"tensor_parallel_size={short_number(tensor_parallel_size)}: must be at most {MOST}",
            argument="tensor_parallel_size",
        )
    if tensor_parallel_size < 1:
        raise ModelConfigError(
            f"tensor_parallel_size={tensor_parallel_size}: must be at least 1",
            argument="tensor_parallel_size",
        )
    try:
        cache_dtype = kv_cache_dtype_name(kv_cache_dtype)
        given = None if dtype is None else dtype_name(dtype)
    except SpecError as error:
        raise ModelConfigError(str(error)) from error
    if client not in {*Client}:
        raise ModelConfigError(f"client={shown(client)}: must be one of {', '.join(Client)}")
    if client == Client.TRANSFORMERS and cache_dtype != "auto":
        raise ModelConfigError(
            f"kv_cache_dtype={cache_dtype!r}: transformers keeps keys and values in its own caches, in the dtype of the layer"
        )
    data = None
    if isinstance(path_or_config, (str, os.PathLike)):
        from attnplug.integrations.reader.config_json import config_path, parse

        data = parse(config_path(Path(path_or_config)))
    notes: tuple[str, ...] = ()
    if cache_dtype == "auto" and client == Client.ENGINE:
        # Only a quantizer that names modules needs the layers before their storage is known.
        caches = functools.cache(
            lambda: _caches(_read(path_or_config, data, tensor_parallel_size, "auto", Client.ENGINE, given))
        )
        cache_dtype, notes = _stored(path_or_config, data, caches)
    model = _read(path_or_config, data, tensor_parallel_size, cache_dtype, Client(client), given)
    return dataclasses.replace(model, notes=(*notes, *model.notes)) if notes else model


def _caches(model: ModelSpec) -> list[str]:
    """The attention modules with a cache of their own."""
    return [
        name.partition("#")[0]
        for name, spec in model.layers.items()
        if not spec.direct_kv and name not in model.kv_sharing
    ]


def _stored(
    source: Any, data: dict[str, Any] | None, caches: Callable[[], list[str]]
) -> tuple[str, tuple[str, ...]]:
    """The storage that the checkpoint names, and a note about it."""
    from attnplug.integrations.reader.stored_dtype import folder_of, stored_kv_dtype

    if data is None and not hasattr(source, "to_dict"):
        return "auto", ()  # load_config refuses the object
    stored = stored_kv_dtype(source if data is None else data, folder_of(source), caches)
    if stored.dtype == "auto":
        return "auto", ()
    return stored.dtype, (f"The checkpoint's KV cache is {stored.dtype} ({', '.join(stored.places)}).",)


def _read(
    source: Any, data: dict[str, Any] | None, ranks: int, cache_dtype: str, client: Client, dtype: str | None
) -> ModelSpec:
    """The layers by the rule of a known type, else by a run of the model."""
    from attnplug.integrations.known.reading import read_known

    if data is not None:
        known = read_known(data if dtype is None else {**data, "dtype": dtype}, ranks, cache_dtype, client)
        if known is not None:
            return known
    try:
        import transformers as _  # noqa: F401
    except ImportError as error:
        raise ModelConfigError(
            "reading a model configuration needs transformers; pip install 'transformers>=5.15'"
        ) from error
    from attnplug.integrations.reader.config_file import load_config
    from attnplug.integrations.reader.model_reading import read_model

    config, notes = load_config(source)
    return read_model(config, ranks, cache_dtype, client, dtype, notes)


def __getattr__(name: str) -> Any:
    # Registering imports torch and transformers, which users of ModelSpec alone may not have installed.
    if name not in ("attention_decisions", "register", "set_attention"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attnplug.integrations.attention import registration

    return getattr(registration, name)
