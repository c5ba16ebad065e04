"""What a LayerSpec asks of a backend: features and kinds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from spec_strategies import MLA_SIZES, SIZES, specs

from attnplug.core import AttentionType, Feature, LayerSpec, SparseSpec
from attnplug.core.spec import KINDS
from attnplug.core.state.dims import StateDims

NON_CAUSAL, ENCODER = Feature.NON_CAUSAL, Feature.ENCODER
NOTHING = Feature(0)
DELTA, CONV = StateDims(rule="delta", decay="head"), StateDims(rule="conv", width=4)

ASKED: list[tuple[dict[str, Any], Feature]] = [
    ({}, NOTHING),
    ({"num_heads": 16}, NOTHING),
    ({"num_kv_heads": 4}, NOTHING),
    ({"head_size": 80}, NOTHING),
    ({"head_size_v": 64}, NOTHING),
    ({"head_size_v": 32}, Feature.HEAD_SIZE_V),
    ({"dtype": "float32"}, NOTHING),
    ({"kv_cache_dtype": "float16"}, NOTHING),
    ({"kv_cache_dtype": "fp8"}, Feature.FP8_KV),
    ({"kv_cache_dtype": "fp8_e4m3"}, Feature.FP8_KV),
    ({"kv_cache_dtype": "fp8_e5m2"}, Feature.FP8_KV),
    ({"kv_cache_dtype": "fp8", "head_scales": True}, Feature.FP8_KV | Feature.HEAD_SCALES),
    ({"block_size": 16}, NOTHING),
    ({"attn_type": "encoder"}, ENCODER | NON_CAUSAL),
    ({"attn_type": "encoder_only"}, ENCODER | NON_CAUSAL),
    ({"attn_type": "encoder_only", "causal": True}, ENCODER),
    ({"attn_type": "encoder_decoder"}, Feature.CROSS | NON_CAUSAL),
    ({"causal": True}, NOTHING),
    ({"causal": False}, NON_CAUSAL),
    ({"scale": 1.0}, NOTHING),
    ({"window": (-1, 5)}, NOTHING),
    ({"window": (5, -1)}, Feature.SLIDING_WINDOW),
    ({"window": (-1, 5), "causal": False}, Feature.SLIDING_WINDOW | NON_CAUSAL),
    ({"sliding_window": 6}, Feature.SLIDING_WINDOW),
    ({"chunk_size": 8}, Feature.CHUNKED_LOCAL),
    ({"logits_soft_cap": 30.0}, Feature.SOFT_CAP),
    ({"has_sinks": True}, Feature.SINKS),
    ({"has_alibi": True}, Feature.ALIBI),
    ({**MLA_SIZES}, Feature.MLA),
    ({"sparse": SparseSpec("token_topk", 2048)}, Feature.SPARSE),
    ({"mm_prefix": True}, Feature.MM_PREFIX),
    ({"direct_kv": True}, Feature.DIRECT_KV),
    ({"needs_lse": True}, Feature.LSE),
    ({"invariance": ("batch",)}, Feature.INVARIANCE),
    ({"state": DELTA}, Feature.STATE),
    ({"state": DELTA, "head_size_v": 32}, Feature.STATE),
    ({"state": dataclasses.replace(DELTA, drafts=3)}, Feature.STATE | Feature.STATE_DRAFTS),
    ({"state": DELTA, "block_size": 64}, Feature.STATE | Feature.STATE_CHECKPOINTS),
    ({"state": CONV, "num_kv_heads": 8, "head_size": 1}, Feature.STATE),
]


@pytest.mark.parametrize(("arguments", "asked"), ASKED, ids=str)
def test_each_field_asks_its_features_and_no_others(arguments: dict[str, Any], asked: Feature) -> None:
    assert LayerSpec(**{**SIZES, **arguments}).required_features() == asked


def test_every_field_and_every_feature_is_in_the_table() -> None:
    fields = {field.name for field in dataclasses.fields(LayerSpec) if field.init}
    assert fields <= {name for arguments, _ in ASKED for name in arguments}
    assert {flag for _, asked in ASKED for flag in asked} == set(Feature)


@given(specs())
def test_what_is_asked_together_is_the_union(spec: LayerSpec) -> None:
    asked = spec.required_features()
    assert (Feature.CHUNKED_LOCAL in asked) is (spec.chunk_size is not None)
    assert (Feature.SOFT_CAP in asked) is (spec.logits_soft_cap is not None)
    assert (Feature.NON_CAUSAL in asked) is not spec.causal
    assert (Feature.SINKS in asked, Feature.ALIBI in asked) == (spec.has_sinks, spec.has_alibi)
    assert (Feature.LSE in asked, Feature.DIRECT_KV in asked) == (spec.needs_lse, spec.direct_kv)
    assert (Feature.MLA in asked) is (spec.mla is not None)
    assert (Feature.SLIDING_WINDOW in asked) is spec.is_windowed
    assert not (Feature.CROSS in asked and Feature.ENCODER in asked)


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        ({}, ("full",)),
        ({"causal": False}, ("full",)),
        ({"has_sinks": True, "logits_soft_cap": 30.0}, ("full",)),
        ({"sliding_window": 4}, ("sliding",)),
        ({"chunk_size": 4}, ("chunked",)),
        ({"attn_type": "encoder"}, ("encoder",)),
        ({"attn_type": "encoder_only", "window": (4, 4)}, ("encoder", "sliding")),
        ({"attn_type": "encoder_decoder"}, ("cross",)),
        (MLA_SIZES, ("mla",)),
        ({"state": DELTA}, ("state",)),
        ({"state": CONV, "num_kv_heads": 8, "head_size": 1}, ("conv",)),
        ({**MLA_SIZES, "sliding_window": 4}, ("mla", "sliding")),
    ],
    ids=str,
)
def test_kinds_say_who_attends_whom_and_then_which_keys(
    arguments: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    assert LayerSpec(**{**SIZES, **arguments}).kinds == kinds


@given(specs())
def test_a_layer_has_kinds_and_all_are_known(spec: LayerSpec) -> None:
    assert spec.kinds
    assert set(spec.kinds) <= set(KINDS)
    assert ("full" in spec.kinds) is (spec.kinds == ("full",))
    assert ("cross" in spec.kinds) is (spec.attn_type is AttentionType.ENCODER_DECODER)
