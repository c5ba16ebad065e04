"""Hugging Face models: attnplug as their attention, and LayerSpecs read from their configurations.

The reader has no table of model names. It builds the modelling class without weights, runs it once on torch's
meta device, and records and checks every call to attention.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnplug.core.checks import MOST, short_number
from attnplug.core.dtypes import kv_cache_dtype_name
from attnplug.core.errors import ModelConfigError, SpecError
from attnplug.core.text import shown
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
) -> ModelSpec:
    """The attention layers that a model configuration asks for, per tensor-parallel rank.

    Args:
        path_or_config: a `config.json`, its folder, or a `PreTrainedConfig`. The reader never uses the network,
            runs no remote code and does not change the object.
        tensor_parallel_size: ranks that divide the heads. Fewer KV heads than ranks are replicated, so that
            every rank has at least one.
        kv_cache_dtype: storage of paged KV caches; with "auto" the one that the configuration names in
            `quantization_config.kv_cache_scheme`, else the model's dtype. Encoder layers, which receive keys and
            values with the call, keep "auto".
        client: "engine", or "transformers" for the layers as transformers itself runs them with
            `attn_implementation="attnplug"`: each has `direct_kv=True` and the heads and scale of its call, latent
            attention has expanded keys and values, and no layer shares a cache.

    A configuration without a dtype is read as bfloat16, LayerSpec's default, because the checkpoint that
    determines it is not read.

    Inputs follow from the names in the signature of the model class and the sizes in its configuration. A
    vision or audio tower that a run on text does not reach is run by itself. Layers that keep no cache have
    `direct_kv=True`: encoders, towers, text encoders with a causal mask, and cross attention outside a decoder.
    A module that folds windows or frames into its batch computes each of them as a sequence of its own.

    A class or family of remote code is read as the family of transformers that its name says, and `notes` says so.
    Attention that a module computes itself is followed by its operations and compared by numbers; code that attends
    otherwise in a longer text is refused. A part whose attention was not read has the reason in `unread`.

    `scale` is the whole factor between `query @ key` and the logits, including one that the model applies to
    its queries.

    Raises:
        ModelConfigError: the file cannot be read; transformers cannot build the model; the ranks do not divide the
            heads; a LayerSpec cannot describe a layer's attention or its storage (the message names it); no attention
            was read at all. For transformers also: a layer computes its own attention, or attends only chosen keys.
    """
    if isinstance(tensor_parallel_size, bool) or not isinstance(tensor_parallel_size, int):
        raise ModelConfigError(f"tensor_parallel_size={tensor_parallel_size!r}: must be an integer")
    if tensor_parallel_size > MOST:
        raise ModelConfigError(
            f"tensor_parallel_size={short_number(tensor_parallel_size)}: must be at most {MOST}"
        )
    if tensor_parallel_size < 1:
        raise ModelConfigError(f"tensor_parallel_size={tensor_parallel_size}: must be at least 1")
    try:
        cache_dtype = kv_cache_dtype_name(kv_cache_dtype)
    except SpecError as error:
        raise ModelConfigError(str(error)) from error
    if client not in {*Client}:
        raise ModelConfigError(f"client={shown(client)}: must be one of {', '.join(Client)}")
    if client == Client.TRANSFORMERS and cache_dtype != "auto":
        raise ModelConfigError(
            f"kv_cache_dtype={cache_dtype!r}: transformers keeps keys and values in its own caches, in the dtype of the layer"
        )
    from attnplug.integrations.known.reading import read_known
    from attnplug.integrations.reader.stored_dtype import stored_kv_dtype

    data = _parsed(path_or_config)
    if cache_dtype == "auto" and client == Client.ENGINE:
        cache_dtype = stored_kv_dtype(path_or_config if data is None else data)
    if data is not None:
        known = read_known(data, tensor_parallel_size, cache_dtype, Client(client))
        if known is not None:
            return known
    try:
        import transformers as _  # noqa: F401
    except ImportError as error:
        raise ModelConfigError(
            "reading a model configuration needs transformers; pip install 'attnplug[models]'"
        ) from error
    from attnplug.integrations.reader.config_file import load_with_notes
    from attnplug.integrations.reader.model_reading import read_model

    config, notes = load_with_notes(path_or_config)
    return read_model(config, tensor_parallel_size, cache_dtype, Client(client), notes)


def _parsed(source: Any) -> dict[str, Any] | None:
    """The JSON object of a file; None for an object."""
    if not isinstance(source, (str, os.PathLike)):
        return None
    from attnplug.integrations.reader.config_json import config_path, parse

    return parse(config_path(Path(source)))


def __getattr__(name: str) -> Any:
    # Registering imports torch and transformers, which users of ModelSpec alone may not have installed.
    if name not in ("attention_decisions", "register", "set_attention"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from attnplug.integrations.attention import registration

    return getattr(registration, name)
