"""Checks of the fields in a config.json: each says whether a rule understands the value.

An attention layer before the ranks divide its heads, and the rotary embeddings that transformers can build.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType, NoneType
from typing import Any, Final

from attnplug.core.mla.dims import MLADims
from attnplug.core.sparse import SparseSpec
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.integrations.model_spec import Client, make_spec

_METHODS: Final = ("awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mxfp4")


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """Says whether a rule understands a value. `data` says the same to a page, which runs no Python."""

    data: tuple[Any, ...]
    passes: Callable[[Any], bool]

    def __call__(self, value: object) -> bool:
        """Whether the rule understands `value`."""
        return self.passes(value)


def whole(least: int, most: int) -> Check:
    """An integer between `least` and `most`."""
    return Check(("whole", least, most), lambda value: type(value) is int and least <= value <= most)


def number(least: float, most: float = 1e12) -> Check:
    """An integer or a float between `least` and `most`."""
    return Check(
        ("number", least, most),
        lambda value: type(value) in (int, float) and math.isfinite(value) and least <= value <= most,
    )


def real(least: float, most: float = 1e12) -> Check:
    """A float between `least` and `most`; transformers refuses an integer in such a field."""
    return Check(("real", least, most), lambda value: type(value) is float and least <= value <= most)


def one_of(*values: object) -> Check:
    """One of `values`, of the same type: 1 is not True."""
    return Check(
        ("one_of", *values),
        lambda value: any(type(value) is type(each) and value == each for each in values),
    )


def listed(check: Check, most: int = 4096) -> Check:
    """A list of values that pass `check`."""
    return Check(
        ("listed", check.data, most),
        lambda value: type(value) is list and len(value) <= most and all(map(check, value)),
    )


def some(check: Check) -> Check:
    """A list with at least one value, where each value passes `check`."""
    return Check(("some", check.data), lambda value: bool(value) and listed(check)(value))


def optional(check: Check) -> Check:
    """None, or a value that passes `check`."""
    return Check(("optional", check.data), lambda value: value is None or check(value))


def either(*checks: Check) -> Check:
    """A value that passes one of `checks`."""
    data = ("either", *(check.data for check in checks))
    return Check(data, lambda value: any(check(value) for check in checks))


def _is_settings(value: object) -> bool:
    if type(value) is dict:
        return all(map(_is_settings, value.values()))
    if type(value) is list:
        return len(value) <= 4096 and all(map(_is_settings, value))
    return type(value) in (str, bool, NoneType) or number(-1024, 1024)(value)


SETTINGS: Final = Check(("settings",), lambda value: type(value) is dict and _is_settings(value))
"""An object of JSON with small numbers, from which nothing is built."""
QUANTIZATION: Final = Check(
    ("quantization", *_METHODS), lambda value: SETTINGS(value) and value.get("quant_method") in _METHODS
)
"""How the weights are stored: the full reader builds no weights. False for methods that were not tried."""
ANYTHING: Final = Check(("anything",), lambda value: True)


LAYERS: Final = whole(1, 512)
HEADS: Final = whole(1, 1 << 12)
SIZE: Final = whole(1, 1 << 20)
SMALL: Final = whole(0, 1 << 12)
# The full reader runs 61 tokens, or fewer where there are fewer positions.
POSITIONS: Final = whole(64, 1 << 24)
WINDOW: Final = whole(2, 1 << 22)
YES_OR_NO: Final = one_of(True, False)
SHARE: Final = number(0, 1)
TEXT: Final = Check(("text",), lambda value: type(value) is str)
TOKEN: Final = whole(0, 1 << 20)
TOKENS: Final = optional(either(TOKEN, listed(TOKEN)))
ACTIVATION: Final = one_of("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
DTYPES: Final = ("float16", "bfloat16", "float32")


def all_of(check: Check, names: str) -> dict[str, Check]:
    """The check of several fields, whose names have blanks between them."""
    return dict.fromkeys(names.split(), check)


COMMON: Final[Mapping[str, Check]] = MappingProxyType(
    {
        **all_of(TEXT, "_name_or_path model_type transformers_version"),
        **all_of(optional(TOKEN), "bos_token_id pad_token_id"),
        **all_of(one_of(False), "is_encoder_decoder output_attentions output_hidden_states"),
        **all_of(YES_OR_NO, "tie_word_embeddings use_cache"),
        **all_of(optional(one_of(*DTYPES)), "dtype torch_dtype"),
        "architectures": optional(listed(TEXT, 1)),
        "attention_dropout": SHARE,
        # The classes of remote code by the class that loads them. No such code is run.
        "auto_map": SETTINGS,
        "chunk_size_feed_forward": one_of(0),
        "eos_token_id": TOKENS,
        "initializer_range": real(0, 1),
        "max_position_embeddings": POSITIONS,
        "problem_type": one_of(None),
        "quantization_config": QUANTIZATION,
        "return_dict": one_of(True),
        "vocab_size": SIZE,
    }
)
"""Fields of every model type."""

DECODER: Final[Mapping[str, Check]] = MappingProxyType(
    {
        **COMMON,
        **all_of(SIZE, "hidden_size intermediate_size"),
        **all_of(HEADS, "num_attention_heads num_key_value_heads"),
        "attention_bias": YES_OR_NO,
        "hidden_act": ACTIVATION,
        "num_hidden_layers": LAYERS,
        "rms_norm_eps": real(0, 1),
        # `rope_of` checks these together.
        **all_of(ANYTHING, "rope_parameters rope_scaling rope_theta"),
    }
)
"""Fields of decoders with rotary embeddings."""

# No router affects the attention.
EXPERTS: Final[Mapping[str, Check]] = MappingProxyType(
    {
        **all_of(HEADS, "num_experts num_experts_per_tok num_local_experts"),
        **all_of(YES_OR_NO, "norm_topk_prob output_router_logits"),
        **all_of(real(0, 1e3), "router_aux_loss_coef router_jitter_noise"),
        "decoder_sparse_step": whole(1, 512),
        "mlp_only_layers": listed(SMALL),
        "moe_intermediate_size": SIZE,
    }
)
"""Fields of mixtures of experts."""


def dtype_of(data: Mapping[str, Any]) -> str:
    """The dtype of checked fields. transformers prefers `dtype` to the older `torch_dtype`."""
    return str(data.get("dtype") or data.get("torch_dtype") or "bfloat16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One attention layer, with the heads of all ranks.

    `called_scale` is the scale that transformers passes with the call, if the model applies another part of it
    to its queries. `is_paged` says whether an engine keeps the keys and values in pages. `head_size_v` is None
    if it equals `head_size`. With `mla`, `head_size` and `head_size_v` are those of expanded keys and values.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    head_size_v: int | None = None
    called_scale: float | None = None
    attn_type: AttentionType = AttentionType.DECODER
    window: tuple[int, int] = (-1, 0)
    chunk_size: int | None = None
    logits_soft_cap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    mla: MLADims | None = None
    sparse: SparseSpec | None = None
    is_paged: bool = True

    def spec(self, path: str, ranks: int, dtype: str, kv_cache_dtype: str, client: Client) -> LayerSpec:
        """The spec of one rank. ModelConfigError if the ranks do not divide the heads."""
        paged = self.is_paged and client is Client.ENGINE
        fields = ("attn_type", "window", "chunk_size", "logits_soft_cap", "has_sinks", "has_alibi", "sparse")
        sizes: dict[str, Any] = {"head_size": self.head_size}
        kv_heads, scale = self.num_kv_heads, self.scale
        if client is Client.TRANSFORMERS:
            scale = self.scale if self.called_scale is None else self.called_scale
        elif self.mla is not None:
            sizes = {"head_size": self.mla.kv_lora_rank + self.mla.qk_rope_head_dim, "mla": self.mla}
            kv_heads = 1
        if "mla" not in sizes and self.head_size_v is not None:
            sizes["head_size_v"] = self.head_size_v
        return make_spec(
            path,
            num_heads=self.num_heads,
            num_kv_heads=kv_heads,
            ranks=ranks,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype if paged else "auto",
            causal=self.window[1] == 0,
            scale=scale,
            direct_kv=not paged,
            **sizes,
            **{name: getattr(self, name) for name in fields},
        )


Layers = Iterable[tuple[str, Attention]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model type whose layers follow from its configuration by a rule.

    Args:
        classes: the model classes in `architectures`, and what they put before a layer's path; the first one
            is transformers' class for a configuration that names none.
        fields: every field that the rule understands, and the values that it understands.
        required: fields without which the full reader refuses the file.
        defaults: transformers' values of absent fields that the rule reads.
        read: the layers of checked fields, in the order that the model runs them; None for a combination of
            values that the rule does not know.
        clients: the programs whose layers the rule knows.
    """

    classes: Mapping[str, str]
    fields: Mapping[str, Check]
    defaults: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], Layers | None]
    required: tuple[str, ...] = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    clients: tuple[Client, ...] = tuple(Client)


_FACTOR: Final = number(1, 1e6)
_POSITIONS: Final = whole(2, 1 << 24)
_SOME: Final = number(0.01, 1e3)
ROPE_KINDS: Final[dict[str, tuple[str, dict[str, Check]]]] = {
    "default": ("", {}),
    "linear": ("factor", {}),
    "dynamic": ("factor", {}),
    "llama3": (
        "factor low_freq_factor high_freq_factor",
        {"low_freq_factor": _SOME, "high_freq_factor": _SOME, "original_max_position_embeddings": _POSITIONS},
    ),
    "yarn": (
        "factor",
        {
            **all_of(number(0.01, 1e2), "mscale mscale_all_dim"),
            "original_max_position_embeddings": _POSITIONS,
            "attention_factor": optional(_SOME),
            "beta_fast": number(1, 1e3),
            "beta_slow": number(0.01, 1),
            "truncate": YES_OR_NO,
        },
    ),
    "longrope": (
        "short_factor long_factor",
        {
            **all_of(listed(number(0.01, 1e6)), "short_factor long_factor"),
            "original_max_position_embeddings": _POSITIONS,
            "attention_factor": optional(_SOME),
            "factor": optional(_FACTOR),
        },
    ),
}
"""The values that each kind requires, and the checks of all but `rope_theta` and a plain `factor`."""
USUAL: Final = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_of(
    data: Mapping[str, Any], rotary_size: int, kinds: tuple[str, ...] = USUAL, share: float | None = None
) -> dict[str, Any] | None:
    """The parameters of a model with one rotary embedding, with its `rope_type`; None if they are not known.

    Args:
        data: the configuration. Older files have `rope_scaling` and `rope_theta` for `rope_parameters`.
        rotary_size: elements of a head that rotate.
        kinds: the kinds that the model type can have.
        share: the `partial_rotary_factor` that the caller has found; None where the model type has none.
    """
    old, new, theta = (data.get(name) for name in ("rope_scaling", "rope_parameters", "rope_theta"))
    if rotary_size < 2 or rotary_size % 2 or (old and new):
        return None
    # Empty values of any type have other meanings in other versions of transformers.
    if any(given is not None and not given for given in (old, new)):
        return None
    if not ((theta is None and "rope_theta" not in data) or number(2)(theta)):
        return None
    given = old or new or {}
    if type(given) is not dict:
        return None
    rope = dict(given)
    if rope.pop("partial_rotary_factor", share if share is not None else 1.0) != (share or 1.0):
        return None
    return rope if _is_known(rope, rotary_size, kinds) else None


def each_rope_is_known(ropes: Mapping[str, Any], rotary_size: int, kinds: tuple[str, ...]) -> bool:
    """Whether all of a model's rotary embeddings, by layer type, are of `kinds`."""
    return all(type(rope) is dict and _is_known(dict(rope), rotary_size, kinds) for rope in ropes.values())


def rope_checks(kind: str) -> tuple[list[str], dict[str, Check]]:
    """The values that a kind of `ROPE_KINDS` requires, and the checks of all that it can have."""
    required, own = ROPE_KINDS[kind]
    plain = {} if kind == "default" else {"factor": _FACTOR}
    return required.split(), {"rope_theta": number(2), **plain, **own}


def _is_known(rope: dict[str, Any], rotary_size: int, kinds: tuple[str, ...]) -> bool:
    """Whether transformers can build an embedding of `rope`; sets its `rope_type`."""
    legacy = rope.pop("type", None)
    kind = rope.setdefault("rope_type", legacy or "default")
    if kind not in kinds or legacy not in (None, kind):
        return False
    required, checks = rope_checks(kind)
    if any(name not in rope for name in required):
        return False
    if not all(name in checks and checks[name](value) for name, value in rope.items() if name != "rope_type"):
        return False
    # Llama 4 Scout has equal factors, so that no frequency lies between both.
    if kind == "llama3" and rope["high_freq_factor"] < rope["low_freq_factor"]:
        return False
    if kind == "longrope":
        return len(rope["short_factor"]) == len(rope["long_factor"]) == rotary_size // 2
    return True
