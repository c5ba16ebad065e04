"""Checks of the fields in a config.json: each says whether a rule understands the value."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType, NoneType
from typing import Any, Final

Check = Callable[[Any], bool]
_METHODS: Final = ("awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mxfp4")


def whole(least: int, most: int) -> Check:
    """An integer between `least` and `most`."""
    return lambda value: type(value) is int and least <= value <= most


def number(least: float, most: float = 1e12) -> Check:
    """An integer or a float between `least` and `most`."""
    return lambda value: type(value) in (int, float) and math.isfinite(value) and least <= value <= most


def real(least: float, most: float = 1e12) -> Check:
    """A float between `least` and `most`; transformers refuses an integer in such a field."""
    return lambda value: type(value) is float and least <= value <= most


def one_of(*values: object) -> Check:
    """One of `values`, of the same type: 1 is not True."""
    return lambda value: any(type(value) is type(each) and value == each for each in values)


def listed(check: Check, most: int = 4096) -> Check:
    """A list of values that pass `check`."""
    return lambda value: type(value) is list and len(value) <= most and all(map(check, value))


def some(check: Check) -> Check:
    """A list with at least one value, all of which pass `check`."""
    return lambda value: bool(value) and listed(check)(value)


def optional(check: Check) -> Check:
    """None, or a value that passes `check`."""
    return lambda value: value is None or check(value)


def settings(value: object) -> bool:
    """An object of JSON with small numbers, of which nothing is built."""
    if type(value) is dict:
        return all(map(settings, value.values()))
    if type(value) is list:
        return len(value) <= 4096 and all(map(settings, value))
    return type(value) in (str, bool, NoneType) or number(-1024, 1024)(value)


def code_map(value: object) -> bool:
    """The classes of remote code by the class that loads them. No such code is run."""
    return type(value) is dict and settings(value)


def quantization(value: object) -> bool:
    """How the weights are stored: the full reader builds no weights. False for methods that were not tried."""
    return type(value) is dict and value.get("quant_method") in _METHODS and settings(value)


def anything(value: object) -> bool:
    """Any value: nothing reads the field."""
    return True


LAYERS: Final = whole(1, 512)
HEADS: Final = whole(1, 1 << 12)
SIZE: Final = whole(1, 1 << 20)
SMALL: Final = whole(0, 1 << 12)
# The full reader runs 61 tokens, or fewer where there are fewer positions.
POSITIONS: Final = whole(64, 1 << 24)
WINDOW: Final = whole(2, 1 << 22)
YES_OR_NO: Final = one_of(True, False)
SHARE: Final = number(0, 1)
TEXT: Final[Check] = lambda value: type(value) is str  # noqa: E731
TOKEN: Final = whole(0, 1 << 20)
TOKENS: Final[Check] = lambda value: value is None or TOKEN(value) or listed(TOKEN)(value)  # noqa: E731
ACTIVATION: Final = one_of("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
DTYPES: Final = ("float16", "bfloat16", "float32")

COMMON: Final[Mapping[str, Check]] = MappingProxyType(
    {
        "_name_or_path": TEXT,
        "architectures": optional(listed(TEXT, 1)),
        "attention_dropout": SHARE,
        "auto_map": code_map,
        "bos_token_id": optional(TOKEN),
        "chunk_size_feed_forward": one_of(0),
        "dtype": optional(one_of(*DTYPES)),
        "eos_token_id": TOKENS,
        "initializer_range": real(0, 1),
        "is_encoder_decoder": one_of(False),
        "max_position_embeddings": POSITIONS,
        "model_type": TEXT,
        "output_attentions": one_of(False),
        "output_hidden_states": one_of(False),
        "pad_token_id": optional(TOKEN),
        "problem_type": one_of(None),
        "quantization_config": quantization,
        "return_dict": one_of(True),
        "tie_word_embeddings": YES_OR_NO,
        "torch_dtype": optional(one_of(*DTYPES)),
        "transformers_version": TEXT,
        "use_cache": YES_OR_NO,
        "vocab_size": SIZE,
    }
)
"""Fields of every model type."""

DECODER: Final[Mapping[str, Check]] = MappingProxyType(
    {
        **COMMON,
        "attention_bias": YES_OR_NO,
        "hidden_act": ACTIVATION,
        "hidden_size": SIZE,
        "intermediate_size": SIZE,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": real(0, 1),
        # rope.py checks these four together.
        "rope_parameters": anything,
        "rope_scaling": anything,
        "rope_theta": anything,
    }
)
"""Fields of decoders with rotary embeddings."""

EXPERTS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        "decoder_sparse_step": whole(1, 512),
        "mlp_only_layers": listed(SMALL),
        "moe_intermediate_size": SIZE,
        "norm_topk_prob": YES_OR_NO,
        "num_experts": HEADS,
        "num_experts_per_tok": HEADS,
        "num_local_experts": HEADS,
        "output_router_logits": YES_OR_NO,
        "router_aux_loss_coef": real(0, 1e3),
        "router_jitter_noise": real(0, 1e3),
    }
)
"""Fields of mixtures of experts. No router affects the attention."""


def dtype_of(data: Mapping[str, Any]) -> str:
    """The dtype of checked fields. transformers prefers `dtype` to the older `torch_dtype`."""
    return str(data.get("dtype") or data.get("torch_dtype") or "bfloat16")
