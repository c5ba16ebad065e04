"""A model's configuration in a folder of its own, as engines read it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROPE_THETA = 1e8
"""With this base the slowest parts of a rotary embedding are the same at any distance, as lookup.py needs."""


def folder(file: str, layers: int | None, *, one_kv_head: bool = False, dense: bool = False) -> str:
    """A new folder with the configuration in so many layers; quantization, tied embeddings and rotary base differ.

    Kinds of layers repeat where there are more layers than the model has. With `one_kv_head` all query heads read one,
    unless they read latents. With `dense` DeepSeek's layers all have the dense block of its first ones.
    """
    config = json.loads(Path(file).read_text())
    config.pop("quantization_config", None)
    # With one matrix for both ends the likeliest token would be the last one again.
    config["tie_word_embeddings"] = False
    _set_theta(config)
    if one_kv_head and not config.get("kv_lora_rank"):
        config["num_key_value_heads"] = 1
    if layers:
        config["num_hidden_layers"] = layers
        if kinds := config.get("layer_types"):
            config["layer_types"] = [kinds[number % len(kinds)] for number in range(layers)]
    if dense and "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = config["num_hidden_layers"]
    place = Path(tempfile.mkdtemp())
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


def _set_theta(config: dict[str, Any]) -> None:
    for name, value in config.items():
        if isinstance(value, dict):
            _set_theta(value)
        elif name == "rope_theta":
            config[name] = ROPE_THETA


def dense_size(config: Mapping[str, Any]) -> int:
    """The inner size of the dense block that takes the place of gpt-oss's experts, with as much work for each token.

    Attention is measured here, and not every installation has kernels for experts.

    Raises:
        ValueError: the model is another one.
    """
    if config.get("model_type") != "gpt_oss":
        raise ValueError(f"--dense is for gpt_oss; this model is {config.get('model_type')!r}")
    return int(config["intermediate_size"] * config["num_experts_per_tok"])
