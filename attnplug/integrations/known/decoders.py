"""The rules of decoders with rotary embeddings: Llama and its relatives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

from attnplug.integrations.known.fields import (
    ACTIVATION,
    DECODER,
    EXPERTS,
    HEADS,
    SIZE,
    SMALL,
    USUAL,
    WINDOW,
    YES_OR_NO,
    Attention,
    Check,
    Family,
    Layers,
    all_of,
    each_rope_is_known,
    listed,
    number,
    one_of,
    optional,
    real,
    rope_of,
    some,
    whole,
)

Values = Mapping[str, Any]
Kinds = list[str]

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_KINDS: Final = optional(some(one_of(_FULL, _SLIDING)))
_WINDOWS: Final[dict[str, Check]] = {
    "layer_types": _KINDS,
    "max_window_layers": SMALL,
    "sliding_window": optional(WINDOW),
    "use_mrope": one_of(False),
    "use_sliding_window": YES_OR_NO,
}


def head_dim_of(values: Values) -> int:
    """Elements of a head: `head_dim`, or the share of a head in the hidden size."""
    size: int = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    return size


def experts_fit(values: Values) -> bool:
    """Whether a token can have its number of experts; some routers fail with fewer."""
    counts = {values[name] for name in ("num_experts", "num_local_experts") if name in values}
    return len(counts) < 2 and values.get("num_experts_per_tok", 1) <= min(counts, default=1)


def _full_layers(values: Values) -> Kinds:
    return [_FULL] * values["num_hidden_layers"]


def _scale_of_size(values: Values) -> float:
    scale: float = head_dim_of(values) ** -0.5
    return scale


@dataclasses.dataclass(frozen=True, slots=True)
class Decoder:
    """The rule of a decoder whose layers differ in their kind only: it gives the layers of checked fields.

    Args:
        kinds: the kind of each layer; None for values that the rule does not know.
        ropes: the kinds of its rotary embedding.
        scale: of the softmax.
        cap: the field of the soft cap.
        sinks: whether its layers have sinks.
        also: what else must hold, before all.
        one_rope: whether it has one rotary embedding; else `also` checks them.
    """

    kinds: Callable[[Values], Kinds | None] = _full_layers
    _: dataclasses.KW_ONLY
    ropes: tuple[str, ...] = USUAL
    scale: Callable[[Values], float] = _scale_of_size
    cap: str | None = None
    sinks: bool = False
    also: Callable[[Values], bool] | None = None
    one_rope: bool = True

    def __call__(self, values: Values) -> Layers | None:
        """The layers of checked fields; None for a combination of values that the rule does not know."""
        if self.also is not None and not self.also(values):
            return None
        heads, size = values["num_attention_heads"], head_dim_of(values)
        kv_heads = values["num_key_value_heads"] or heads
        if values["hidden_size"] % heads or heads % kv_heads or not experts_fit(values):
            return None
        share = values.get("partial_rotary_factor")
        rotating = size if share is None else int(size * share)
        if self.one_rope and rope_of(values, rotating, self.ropes, share) is None:
            return None
        each = self.kinds(values)
        if each is None or len(each) != values["num_hidden_layers"] or size % 2:
            return None
        window = values.get("sliding_window") or 0
        if _SLIDING in each and not window:
            return None
        if values.get("sliding_window_size", window) != window:
            return None  # the class does not read it, and the full reader says so
        if (factor := self.scale(values)) == 1.0:
            return None  # the full reader looks for the other part of such a scale
        attention = {
            kind: Attention(
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_size=size,
                scale=factor,
                window=(window - 1, 0) if kind == _SLIDING else (-1, 0),
                chunk_size=values["attention_chunk_size"] if kind == _CHUNKED else None,
                logits_soft_cap=values[self.cap] if self.cap else None,
                has_sinks=self.sinks,
            )
            for kind in set(each)
        }
        return [(f"layers.{index}.self_attn", attention[kind]) for index, kind in enumerate(each)]


def _every_layer(values: Values) -> Kinds:
    """A window, where there is one, on every layer."""
    sliding = values["sliding_window"] is not None and values.get("use_sliding_window", True)
    return [_SLIDING if sliding else _FULL] * values["num_hidden_layers"]


def _late_layers(values: Values) -> Kinds | None:
    """A window on the layers from `max_window_layers` on, as Qwen has it."""
    sliding = values["use_sliding_window"] and values["sliding_window"] is not None
    if (given := values["layer_types"]) is not None:
        return given if sliding or _SLIDING not in given else None
    first = values["max_window_layers"] if sliding else values["num_hidden_layers"]
    return [_SLIDING if index >= first else _FULL for index in range(values["num_hidden_layers"])]


def _all_but_each(pattern: int, values: Values) -> Kinds:
    """A window on all layers but each `pattern`-th, or as the file says."""
    every = values.get("sliding_window_pattern", pattern)
    layers = range(1, values["num_hidden_layers"] + 1)
    return values["layer_types"] or [_SLIDING if index % every else _FULL for index in layers]


def _scale_of_gemma(values: Values) -> float:
    scale: float = values["query_pre_attn_scalar"] ** -0.5
    return scale


def _scale_of_granite(values: Values) -> float:
    return float(values["attention_multiplier"])


def _gemma3(values: Values) -> bool:
    """Gemma 3: one rotary embedding for windows, another for full attention."""
    old, new = values.get("rope_scaling"), values.get("rope_parameters")
    if any(not number(2)(values.get(name, 2)) for name in ("rope_theta", "rope_local_base_freq")):
        return False
    if old is not None and not (old and type(old) is dict):
        return False
    ropes = {_FULL: old or {}, _SLIDING: {}} if new is None else new
    if type(ropes) is not dict or set(ropes) != {_FULL, _SLIDING} or (old and new):
        return False
    return each_rope_is_known(ropes, head_dim_of(values), ("default", "linear"))


def _cohere2(values: Values) -> bool:
    """Cohere 2, whose configuration class sets `head_dim`; a file may repeat it."""
    size: int = values["hidden_size"] // values["num_attention_heads"]
    return bool(values.get("head_dim", size) == size)


def _llama4(values: Values) -> Kinds | None:
    """Llama 4: chunks on the layers with rotary embeddings, full attention on those without."""
    count, interval = values["num_hidden_layers"], values["no_rope_layer_interval"]
    rotating = values["no_rope_layers"] or [int((index + 1) % interval != 0) for index in range(count)]
    if len(rotating) != count:
        return None
    return values["layer_types"] or [_CHUNKED if rotates else _FULL for rotates in rotating]


def _family(name: str, read: Callable[[Values], Layers | None], defaults: Values, **fields: Check) -> Family:
    classes = {f"{name}ForCausalLM": "model.", _BASES.get(name, f"{name}Model"): ""}
    return Family(classes=classes, fields={**DECODER, **fields}, defaults=defaults, read=read)


_BASES: Final = {"Gemma3": "Gemma3TextModel", "Llama4": "Llama4TextModel"}
"""Base models whose name has another form; Gemma3Model and Llama4Model read images too."""
_HEAD: Final = whole(2, 1 << 12)
_GEMMA: Final[dict[str, Check]] = {
    **all_of(optional(real(1e-3, 1e6)), "attn_logit_softcapping final_logit_softcapping"),
    "head_dim": _HEAD,
    "hidden_activation": ACTIVATION,
    "query_pre_attn_scalar": whole(2, 1 << 16),
    "use_bidirectional_attention": optional(one_of(False)),
}
_QWEN: Final[dict[str, Any]] = {
    "layer_types": None,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
_GLM: Final = {"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5}

DECODERS: Final[dict[str, Family]] = {
    "llama": _family(
        "Llama",
        Decoder(),
        {"num_key_value_heads": None, "head_dim": None},
        head_dim=optional(_HEAD),
        mlp_bias=YES_OR_NO,
        num_key_value_heads=optional(HEADS),
        pretraining_tp=one_of(1),
    ),
    "mistral": _family(
        "Mistral",
        Decoder(_every_layer),
        {"num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
        head_dim=optional(_HEAD),
        sliding_window=optional(WINDOW),
    ),
    "mixtral": _family(
        "Mixtral",
        Decoder(_every_layer, ropes=("default",)),
        {"num_key_value_heads": 8, "head_dim": None, "sliding_window": None}
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        head_dim=optional(_HEAD),
        sliding_window=optional(WINDOW),
        **EXPERTS,
    ),
    "qwen2": _family("Qwen2", Decoder(_late_layers), _QWEN, **_WINDOWS, num_key_value_heads=optional(HEADS)),
    "qwen2_moe": _family(
        "Qwen2Moe",
        Decoder(),
        {"num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4},
        max_window_layers=SMALL,
        qkv_bias=YES_OR_NO,
        shared_expert_intermediate_size=SIZE,
        sliding_window=optional(WINDOW),
        use_sliding_window=one_of(False),
        **EXPERTS,
    ),
    "qwen3": _family(
        "Qwen3",
        Decoder(_late_layers),
        {**_QWEN, "head_dim": 128},
        **_WINDOWS,
        head_dim=_HEAD,
        num_key_value_heads=optional(HEADS),
    ),
    "qwen3_moe": _family(
        "Qwen3Moe",
        Decoder(_every_layer),
        {"num_key_value_heads": 4, "use_sliding_window": False, "sliding_window": 4096}
        | {"num_experts_per_tok": 8},
        head_dim=_HEAD,
        max_window_layers=SMALL,
        sliding_window=optional(WINDOW),
        use_sliding_window=YES_OR_NO,
        **EXPERTS,
    ),
    "gemma": _family(
        "Gemma",
        Decoder(),
        {"num_key_value_heads": 16, "head_dim": 256},
        head_dim=_HEAD,
        hidden_activation=optional(ACTIVATION),
        use_bidirectional_attention=optional(one_of(False)),
    ),
    "gemma2": _family(
        "Gemma2",
        Decoder(functools.partial(_all_but_each, 2), scale=_scale_of_gemma, cap="attn_logit_softcapping"),
        {"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "layer_types": None}
        | {"sliding_window": 4096, "attn_logit_softcapping": 50.0},
        **_GEMMA,
        cache_implementation=one_of("hybrid"),
        layer_types=_KINDS,
        sliding_window=WINDOW,
        sliding_window_size=WINDOW,
    ),
    "gemma3_text": _family(
        "Gemma3",
        Decoder(functools.partial(_all_but_each, 6), scale=_scale_of_gemma, also=_gemma3, one_rope=False),
        {"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "layer_types": None}
        | {"sliding_window": 4096},
        **{**_GEMMA, "attn_logit_softcapping": one_of(None)},
        **all_of(whole(1, 512), "_sliding_window_pattern sliding_window_pattern"),
        cache_implementation=one_of("hybrid"),
        layer_types=_KINDS,
        rope_local_base_freq=number(2),
        sliding_window=WINDOW,
    ),
    "gpt_oss": _family(
        "GptOss",
        Decoder(functools.partial(_all_but_each, 2), sinks=True),
        {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "layer_types": None}
        | {"num_local_experts": 128, "num_experts_per_tok": 4},
        experts_per_token=HEADS,
        head_dim=_HEAD,
        initial_context_length=SIZE,
        layer_types=_KINDS,
        sliding_window=WINDOW,
        swiglu_limit=number(0),
        **EXPERTS,
    ),
    "phi3": _family(
        "Phi3",
        Decoder(_every_layer, ropes=("default", "longrope")),
        {"num_key_value_heads": None, "sliding_window": None},
        num_key_value_heads=optional(HEADS),
        original_max_position_embeddings=whole(64, 1 << 24),
        partial_rotary_factor=one_of(0.25, 0.5, 0.75, 1.0),
        **all_of(number(0, 1), "embd_pdrop resid_pdrop"),
        sliding_window=optional(WINDOW),
    ),
    "glm": _family("Glm", Decoder(), _GLM, head_dim=_HEAD, partial_rotary_factor=one_of(0.5)),
    "glm4": _family("Glm4", Decoder(), _GLM, head_dim=_HEAD, partial_rotary_factor=one_of(0.5)),
    "olmo2": _family("Olmo2", Decoder(), {"num_key_value_heads": None}, num_key_value_heads=optional(HEADS)),
    "cohere2": _family(
        "Cohere2",
        Decoder(functools.partial(_all_but_each, 4), also=_cohere2),
        {"num_key_value_heads": None, "sliding_window": 4096, "layer_types": None},
        cache_implementation=one_of("hybrid"),
        head_dim=_HEAD,
        layer_norm_eps=real(0, 1),
        layer_types=_KINDS,
        order_of_interleaved_layers=one_of("local_attn_first"),
        position_embedding_type=one_of("rope_gptj"),
        rotary_pct=one_of(1.0),
        use_qk_norm=one_of(False),
        logit_scale=real(0, 1e3),
        num_key_value_heads=optional(HEADS),
        sliding_window=WINDOW,
        **all_of(
            YES_OR_NO, "use_embedding_sharing use_gated_activation use_parallel_block use_parallel_embedding"
        ),
        **all_of(whole(1, 512), "layer_switch sliding_window_pattern"),
    ),
    "granite": _family(
        "Granite",
        Decoder(scale=_scale_of_granite),
        {"num_key_value_heads": None, "attention_multiplier": 1.0},
        attention_multiplier=number(1e-6, 1e3),
        mlp_bias=YES_OR_NO,
        num_key_value_heads=optional(HEADS),
        **all_of(number(1e-6, 1e6), "embedding_multiplier logits_scaling residual_multiplier"),
    ),
    "llama4_text": _family(
        "Llama4",
        Decoder(_llama4),
        {"num_key_value_heads": 8, "head_dim": 128, "attention_chunk_size": 8192, "layer_types": None}
        | {"no_rope_layers": None, "no_rope_layer_interval": 4, "num_local_experts": 16}
        | {"num_experts_per_tok": 1},
        attention_chunk_size=WINDOW,
        attn_scale=real(0, 1e3),
        floor_scale=whole(1, 1 << 24),
        head_dim=_HEAD,
        intermediate_size_mlp=SIZE,
        layer_types=optional(some(one_of(_FULL, _CHUNKED))),
        moe_layers=optional(listed(SMALL)),
        no_rope_layers=optional(listed(one_of(0, 1))),
        **all_of(YES_OR_NO, "attn_temperature_tuning use_qk_norm"),
        **all_of(whole(1, 512), "interleave_moe_layer_step no_rope_layer_interval"),
        **EXPERTS,
    ),
}
"""Model types of decoders, by name."""
