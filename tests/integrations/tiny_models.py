"""Small models of any class of transformers: default configurations with small numbers, and inputs for them."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

VOCABULARY = 96
_SMALL = {
    r"vocab_size$": VOCABULARY,
    r"^(hidden_size|d_model|n_embd|emb_dim|dim|embed_dim|embedding_size|hidden_dim|width)$": 32,
    r"(num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers|depth|num_blocks)$": 2,
    r"(num_attention_heads|n_heads?|num_heads|attention_heads)$": 4,
    r"(num_key_value_heads|num_kv_heads|multi_query_group_num)$": 2,
    r"(head_dim|d_kv|attention_head_dim)$": 8,
    r"(intermediate_size|ffn_dim|n_inner|d_ff|d_inner|mlp_dim|ffn_hidden_size|feed_forward_size)$": 48,
    r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$": 4,
    r"(num_experts_per_tok|moe_topk|top_k_experts)$": 2,
    r"image_size$": 32,
    r"patch_size$": 8,
    r"(max_position_embeddings|n_positions|n_ctx|max_target_positions|max_source_positions)$": 128,
    r"num_mel_bins$": 16,
}
"""The largest value of each field whose name matches; other fields keep their defaults."""


def tiny_config(cls: type[PreTrainedModel]) -> PreTrainedConfig:
    """The default configuration of a model class, with small numbers also in its parts."""
    config = cls.config_class()  # type: ignore[misc]
    _shrink(config)
    return config


def _shrink(config: PreTrainedConfig) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _shrink(value)
        elif type(value) is int and not name.startswith("_"):
            small = next((size for words, size in _SMALL.items() if re.search(words, name)), value)
            setattr(config, name, min(value, small))
    kinds = getattr(config, "layer_types", None)
    layers = getattr(config, "num_hidden_layers", None)
    if kinds and isinstance(layers, int):
        # Each kind of layer once, so that a window is not lost with the number of layers.
        config.layer_types = (list(dict.fromkeys(kinds)) * layers)[:layers]
    if isinstance(getattr(config, "pad_token_id", None), int) and config.pad_token_id >= VOCABULARY:
        config.pad_token_id = 0


def is_tiny(cls: type[PreTrainedModel], config: PreTrainedConfig, limit: int = 50_000_000) -> bool:
    """Whether the model has at most `limit` parameters; nothing is allocated."""
    with torch.device("meta"):
        model = cls._from_config(copy.deepcopy(config), attn_implementation="eager")
    return sum(weight.numel() for weight in model.parameters()) <= limit


def tiny_model(cls: type[PreTrainedModel], config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    """The model of a copy of `config`, with weights that make attention matter."""
    torch.manual_seed(0)
    model = cls._from_config(copy.deepcopy(config), attn_implementation=attention).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.normal_(std=1.2 * weight.shape[-1] ** -0.5)
    return model


def tiny_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Two rows of what the model takes: text, an image or sound, and text for a decoder."""
    config: Any = model.config
    accepted = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(1)

    def ids(length: int) -> torch.Tensor:
        return torch.randint(5, VOCABULARY - 5, (2, length), generator=generator)

    given: dict[str, torch.Tensor] = {}
    if model.main_input_name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 32)
        size = size if isinstance(size, int) else size[0]
        channels = getattr(vision, "num_channels", 3)
        given["pixel_values"] = torch.randn(2, channels, size, size, generator=generator)
    elif model.main_input_name == "input_features":
        shape = (2, getattr(config, "num_mel_bins", 16), 2 * getattr(config, "max_source_positions", 20))
        given["input_features"] = torch.randn(shape, generator=generator)
    elif model.main_input_name == "input_values":
        given["input_values"] = torch.randn(2, 4000, generator=generator)
    if "input_ids" in accepted and model.main_input_name not in ("input_features", "input_values"):
        given["input_ids"] = ids(12)
    if "decoder_input_ids" in accepted:
        given["decoder_input_ids"] = ids(7)
    return given


def first_tensor(output: Any) -> torch.Tensor:
    """The first floating tensor of a model's output."""
    return next(v for v in output.values() if isinstance(v, torch.Tensor) and v.is_floating_point())


def model_class(name: str) -> type[PreTrainedModel]:
    """The model class of that name in transformers."""
    cls: type[PreTrainedModel] = getattr(transformers, name)
    return cls
