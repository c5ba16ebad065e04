"""Hypothesis strategies for LayerSpec: the arguments of specs that exist, over every field."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from attnplug.core import AttentionType, LayerSpec, MLADims, SparseSpec
from attnplug.core.state.dims import StateDims

SIZES = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64}
"""The least that a LayerSpec needs."""

DIMS = MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
MLA_SIZES: dict[str, Any] = {"num_heads": 16, "num_kv_heads": 1, "head_size": 576, "mla": DIMS}
"""The least that a spec with MLA needs."""

_flags = st.booleans()
_sizes = st.integers(1, 512)
_scales = st.floats(1e-3, 1e3)
_sparse = st.builds(SparseSpec, st.just("token_topk"), _sizes) | st.builds(
    SparseSpec, st.just("block"), _sizes, st.integers(2, 128)
)
_recurrences = st.builds(
    StateDims,
    rule=st.sampled_from(["linear", "delta"]),
    decay=st.sampled_from(["head", "row"]),
    drafts=st.integers(0, 8),
)


@st.composite
def spec_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Keyword arguments from which a LayerSpec can be made."""
    if draw(st.integers(0, 7)) == 7:
        return draw(_state_arguments())
    arguments: dict[str, Any] = {
        "dtype": draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        "kv_cache_dtype": draw(st.sampled_from(["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "float16"])),
        "block_size": draw(st.none() | _sizes),
        "scale": draw(st.none() | _scales),
        "logits_soft_cap": draw(st.none() | _scales),
    }
    for flag in ("has_sinks", "has_alibi", "mm_prefix", "direct_kv", "needs_lse"):
        arguments[flag] = draw(_flags)
    arguments["sparse"] = draw(st.none() | _sparse)
    if draw(_flags):
        dims = draw(st.builds(MLADims, **dict.fromkeys(MLADims.__slots__, _sizes)))
        size = dims.kv_lora_rank + dims.qk_rope_head_dim
        arguments |= {"num_heads": draw(_sizes), "num_kv_heads": 1, "head_size": size, "mla": dims}
        return arguments
    groups = draw(st.integers(1, 16))
    arguments["num_kv_heads"] = draw(st.integers(1, 16))
    arguments["num_heads"] = arguments["num_kv_heads"] * groups
    arguments["head_size"] = draw(_sizes)
    arguments["head_size_v"] = draw(st.none() | _sizes)
    arguments["attn_type"] = draw(st.sampled_from(AttentionType))
    cross = arguments["attn_type"] is AttentionType.ENCODER_DECODER
    arguments["causal"] = draw(st.sampled_from([None, False] if cross else [None, False, True]))
    if _is_causal(arguments) and draw(_flags):
        arguments["chunk_size"] = draw(_sizes)
    else:
        arguments["window"] = draw(st.tuples(st.integers(-1, 100), st.integers(-1, 100)))
    return arguments


@st.composite
def _state_arguments(draw: st.DrawFn) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "dtype": draw(st.sampled_from(["float16", "bfloat16", "float32"])),
        "kv_cache_dtype": draw(st.sampled_from(["auto", "float32", "bfloat16", "float16"])),
        "block_size": draw(st.none() | _sizes),
        "scale": draw(st.none() | _scales),
    }
    groups, heads = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    if draw(_flags):
        conv = StateDims(
            rule="conv", width=draw(st.integers(2, 8)), activation=draw(st.sampled_from([None, "silu"]))
        )
        return {**arguments, "num_heads": heads, "num_kv_heads": heads, "head_size": 1, "state": conv}
    arguments |= {"num_heads": heads * groups, "num_kv_heads": heads, "state": draw(_recurrences)}
    return {**arguments, "head_size": draw(_sizes), "head_size_v": draw(st.none() | _sizes)}


def _is_causal(arguments: dict[str, Any]) -> bool:
    causal: bool | None = arguments["causal"]
    return arguments["attn_type"] is AttentionType.DECODER if causal is None else causal


def specs() -> st.SearchStrategy[LayerSpec]:
    """Any LayerSpec."""
    return spec_arguments().map(lambda arguments: LayerSpec(**arguments))
