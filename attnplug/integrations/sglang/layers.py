"""SGLang's RadixAttention as a LayerSpec: each attribute that changes the result is read or refused."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import torch

from attnplug.core.errors import SpecError
from attnplug.core.spec import LayerSpec
from attnplug.integrations.sglang.caches import OTHER

READ = frozenset(
    (
        *("tp_q_head_num", "tp_k_head_num", "tp_v_head_num", "head_dim", "qk_head_dim", "v_head_dim"),
        *("scaling", "layer_id", "logit_cap", "logit_capping_method", "sliding_window_size", "attn_type"),
        *("is_cross_attention", "use_irope", "pos_encoding_mode", "xai_temperature_len"),
        *("k_scale", "v_scale", "k_scale_float", "v_scale_float"),
    )
)
"""The attributes that are read or refused below."""
HARMLESS = frozenset(
    (
        # How SGLang calls the layer, and whose method made its scales.
        *("use_prefill_attention_wrapper", "quant_method", "_is_hf_initialized"),
        # Queries are not quantised, and an indexer's keys come with arguments that are refused.
        *("q_scale_float", "idx_q_scale_float", "idx_k_scale_float", "idx_v_scale_float"),
    )
)
"""The attributes without meaning for attnplug's backends."""
_OF_MODULES = frozenset(vars(torch.nn.Module()))
_UNSET = (None, False, 0, -1, "")

look = operator.attrgetter(
    *("layer_id", "sliding_window_size", "scaling", "logit_cap", "attn_type", "xai_temperature_len"),
    *("k_scale_float", "v_scale_float"),
)
"""The values that models change after the layer is made; a layer with others is read again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of SGLang's runner about all of its layers.

    Args:
        dtype: that the model computes in.
        page_size: tokens in a page.
        chunk_size: of layers with chunks, or None.
        invariance: what deterministic inference asks for.
    """

    dtype: torch.dtype
    page_size: int
    chunk_size: int | None = None
    invariance: tuple[str, ...] = ()


def spec_of(layer: Any, facts: Facts, *, kv_cache_dtype: str, has_sinks: bool) -> LayerSpec:
    """What the layer asks for.

    Args:
        layer: a RadixAttention.
        facts: of its runner.
        kv_cache_dtype: attnplug's name of the stored type.
        has_sinks: whether its call has sinks.

    Raises:
        SpecError: a value that no backend of attnplug serves in SGLang, or an attribute that is not known.
    """
    _check_unknown(layer)
    kind = _kind(layer)
    direct = kind == "encoder_only"
    if layer.tp_v_head_num != layer.tp_k_head_num:
        limit = f"must be tp_k_head_num={layer.tp_k_head_num}"
        raise SpecError("tp_v_head_num", layer.tp_v_head_num, limit, OTHER)
    if not direct and layer.v_head_dim != layer.qk_head_dim:
        limit = f"must be qk_head_dim={layer.qk_head_dim}: SGLang allocates such K and V apart"
        raise SpecError("v_head_dim", layer.v_head_dim, limit, OTHER)
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        limit = "must be tanh where the layer has a logit_cap"
        raise SpecError("logit_capping_method", layer.logit_capping_method, limit, OTHER)
    if layer.pos_encoding_mode != "NONE":
        limit = "must be NONE: attention has no positions of its own"
        raise SpecError("pos_encoding_mode", layer.pos_encoding_mode, limit, OTHER)
    if layer.xai_temperature_len is not None and layer.xai_temperature_len > 0:
        limit = "is a temperature by length, which is not served"
        raise SpecError("xai_temperature_len", layer.xai_temperature_len, limit, OTHER)
    return LayerSpec(
        num_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_size=layer.qk_head_dim,
        head_size_v=layer.v_head_dim,
        dtype=facts.dtype,
        kv_cache_dtype="auto" if direct else kv_cache_dtype,
        block_size=None if direct else facts.page_size,
        attn_type=kind,
        scale=float(layer.scaling),
        logits_soft_cap=layer.logit_cap or None,
        has_sinks=has_sinks,
        direct_kv=direct,
        invariance=facts.invariance,
        **_visible(layer, kind, facts),
    )


def scales_of(layer: Any, spec: LayerSpec) -> tuple[float, float]:
    """The scales of stored keys and values; 1 where pages store values as they are.

    SpecError: scales for each head.
    """
    if not spec.has_quantized_kv_cache:
        return 1.0, 1.0  # the layer's scales are of values that were quantised
    return _scale(layer, "k_scale"), _scale(layer, "v_scale")


def _scale(layer: Any, name: str) -> float:
    value = getattr(layer, f"{name}_float")
    value = getattr(layer, name) if value is None else value
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise SpecError(
                name, tuple(value.shape), "must have one element: scales for each head are not served", OTHER
            )
        value = value.item()
    return 1.0 if value is None else float(value)


def _kind(layer: Any) -> str:
    kind = str(getattr(layer.attn_type, "value", layer.attn_type))
    if kind not in ("decoder", "encoder_only"):
        limit = "is not served in SGLang: its queries see later tokens in some steps"
        raise SpecError("attn_type", kind, limit, OTHER)
    if not layer.is_cross_attention:
        return kind
    if kind != "decoder":
        raise SpecError("attn_type", kind, "must be decoder for cross attention", OTHER)
    return "encoder_decoder"


def _visible(layer: Any, kind: str, facts: Facts) -> dict[str, Any]:
    """The keys that a query sees, by arguments of LayerSpec."""
    before = layer.sliding_window_size
    windowed = before is not None and before >= 0
    if layer.use_irope:
        if facts.chunk_size is None:
            raise SpecError("use_irope", True, "needs the model's attention_chunk_size", OTHER)
        if kind != "decoder" or windowed:
            raise SpecError("use_irope", True, "needs a decoder layer without a window", OTHER)
        return {"chunk_size": facts.chunk_size}
    if not windowed:
        return {}
    if kind == "encoder_decoder":
        raise SpecError("sliding_window_size", before, "is not served with cross attention", OTHER)
    # SGLang counts the keys before the query's own; an encoder has as many behind it.
    return {"sliding_window": before + 1} if kind == "decoder" else {"window": (before, before)}


def _check_unknown(layer: Any) -> None:
    """Refuse attributes of later versions, and those that a model has added."""
    found = {name: value for name, value in vars(layer).items() if name not in _OF_MODULES}
    for part in ("_parameters", "_buffers", "_modules"):
        found |= vars(layer).get(part) or {}
    for name in found.keys() - READ - HARMLESS:
        value = found[name]
        if hasattr(type(layer), name):
            continue  # a method that was wrapped
        is_part = isinstance(value, torch.Tensor | torch.nn.Module)
        if is_part or not any(value is each or value == each for each in _UNSET):
            limit = "is an attribute that attnplug does not know, and may change the result"
            raise SpecError(name, type(value).__name__ if is_part else value, limit, OTHER)
