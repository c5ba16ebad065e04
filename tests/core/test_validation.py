"""validate_configuration: an empty list for what is served, every reason for what is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_backends import CPU, EVERYTHING, H100, Generous, Latent, Picky, Plain
from spec_strategies import MLA_SIZES, SIZES, specs

from attnplug.core import AttentionType, Device, Feature, LayerSpec, Phase, Reason, SparseSpec
from attnplug.core.reasons import REASON_CODES
from attnplug.core.state.dims import StateDims
from attnplug.errors import SpecError

SPEC = LayerSpec(**SIZES)
DELTA = StateDims(rule="delta", decay="head")
phases = st.sampled_from([None, *Phase])
devices = st.sampled_from([CPU, H100, Device("cuda"), Device("rocm", (9, 4)), Device("xpu")])
backends = st.sampled_from([Plain, Generous, Latent, Picky])


def codes(reasons: list[Reason]) -> list[str]:
    return [reason.code for reason in reasons]


def variant(base: type[Plain] = Plain, **attributes: Any) -> type[Plain]:
    return type("Variant", (base,), attributes)


def test_no_reason_is_a_promise() -> None:
    assert Plain.validate_configuration(SPEC, H100) == []
    assert Picky.validate_configuration(LayerSpec(**SIZES, dtype="float16"), H100, Phase.DECODE) == []
    assert Latent.validate_configuration(LayerSpec(**MLA_SIZES), CPU) == []


def test_every_reason_is_given_and_not_the_first_alone() -> None:
    spec = LayerSpec(
        num_heads=3,
        num_kv_heads=3,
        head_size=80,
        head_size_v=96,
        kv_cache_dtype="int8",
        block_size=24,
        causal=False,
        window=(3, 3),
        logits_soft_cap=30.0,
        has_sinks=True,
        has_alibi=True,
        sparse=SparseSpec("token_topk", 2048),
        mm_prefix=True,
        direct_kv=False,
        needs_lse=True,
    )
    assert Picky.validate_configuration(spec, Device("cuda", (8, 0))) == [
        "head_size not supported: 80 is not one of 64, 128, 256",
        "dtype not supported: bfloat16 is not float16",
        "kv_cache_dtype not supported: int8 is not auto",
        "block_size not supported: 24 is not a multiple of 16; leave block_size unset and the backend chooses",
        "sinks not supported",
        "sparse token_topk 2048 not supported",
        "multimodal prefix spans not supported",
        "compute capability not supported: 8.0",
        "phase not supported: prefill is not decode; select per phase",
        "combination not supported: an even number of heads",
        "sliding_window not supported",
        "soft_cap not supported",
        "alibi not supported",
        "lse not supported",
        "head_size_v not supported",
        "non_causal not supported",
    ]


@given(backends, specs(), devices, phases)
def test_reasons_come_in_one_fixed_order_with_known_codes(
    backend: type[Plain], spec: LayerSpec, device: Device, phase: Phase | None
) -> None:
    reasons = backend.validate_configuration(spec, device, phase)
    heads = [reason.code.partition(".")[0] for reason in reasons]
    assert set(heads) <= set(REASON_CODES)
    assert heads == sorted(heads, key=REASON_CODES.index)
    assert all(type(reason) is Reason for reason in reasons)


@given(backends, specs(), devices, phases)
def test_one_cause_gives_one_reason(
    backend: type[Plain], spec: LayerSpec, device: Device, phase: Phase | None
) -> None:
    reasons = backend.validate_configuration(spec, device, phase)
    causes = [(reason.code, reason.field) for reason in reasons]
    assert len(set(causes)) == len(causes)
    never_as_features = {"mla", "sinks", "sparse", "mm_prefix", "cross", "encoder"}
    assert not never_as_features & {code.removeprefix("feature.") for code in codes(reasons) if "." in code}


@given(specs(), devices, phases)
def test_a_backend_accepts_only_what_it_has_declared(
    spec: LayerSpec, device: Device, phase: Phase | None
) -> None:
    for backend in (Plain, Generous, Latent, Picky):
        if not backend.validate_configuration(spec, device, phase):
            assert spec.required_features() in backend.features
            assert device.type in backend.device_types


@given(backends, specs(), devices, phases)
def test_the_same_question_has_the_same_answer(
    backend: type[Plain], spec: LayerSpec, device: Device, phase: Phase | None
) -> None:
    first = backend.validate_configuration(spec, device, phase)
    assert backend.validate_configuration(spec, device, phase) == first


@pytest.mark.parametrize("flag", Feature)
def test_a_feature_that_is_not_declared_is_refused(flag: Feature) -> None:
    asks = {
        Feature.SLIDING_WINDOW: {"sliding_window": 4},
        Feature.CHUNKED_LOCAL: {"chunk_size": 4},
        Feature.SOFT_CAP: {"logits_soft_cap": 30.0},
        Feature.SINKS: {"has_sinks": True},
        Feature.ALIBI: {"has_alibi": True},
        Feature.MLA: MLA_SIZES,
        Feature.SPARSE: {"sparse": SparseSpec("token_topk", 2048)},
        Feature.MM_PREFIX: {"mm_prefix": True},
        Feature.LSE: {"needs_lse": True},
        Feature.HEAD_SIZE_V: {"head_size_v": 32},
        Feature.NON_CAUSAL: {"causal": False},
        Feature.DIRECT_KV: {"direct_kv": True},
        Feature.FP8_KV: {"kv_cache_dtype": "fp8"},
        Feature.HEAD_SCALES: {"kv_cache_dtype": "fp8", "head_scales": True},
        Feature.CROSS: {"attn_type": "encoder_decoder"},
        Feature.ENCODER: {"attn_type": "encoder_only"},
        Feature.INVARIANCE: {"invariance": ("batch",)},
        Feature.STATE: {"state": DELTA},
        Feature.STATE_DRAFTS: {"state": dataclasses.replace(DELTA, drafts=2)},
        Feature.STATE_CHECKPOINTS: {"state": DELTA, "block_size": 64},
    }
    own_codes = {
        Feature.SINKS: "sink",
        Feature.CROSS: "attn_type",
        Feature.ENCODER: "attn_type",
        Feature.MLA: "mla",
        Feature.SPARSE: "sparse",
        Feature.MM_PREFIX: "mm_prefix",
        Feature.INVARIANCE: "invariance",
    }
    spec = LayerSpec(**{**SIZES, **asks[flag]})
    everything_else = EVERYTHING & ~flag
    if not spec.sparse:
        everything_else &= ~Feature.SPARSE
    if spec.mla is None:
        everything_else &= ~Feature.MLA
    if spec.state is None:
        everything_else &= ~Feature.STATE
    backend = variant(Generous, features=everything_else)
    assert codes(backend.validate_configuration(spec, CPU)) == [
        own_codes.get(flag, f"feature.{str(flag.name).lower()}")
    ]
    assert variant(Generous, features=everything_else | flag).validate_configuration(spec, CPU) == []


def test_a_reason_names_the_field_that_asks() -> None:
    spec = LayerSpec(**SIZES, sliding_window=4, logits_soft_cap=30.0, needs_lse=True, causal=True)
    fields = [reason.field for reason in Plain.validate_configuration(spec, H100)]
    assert fields == ["window", "logits_soft_cap", "needs_lse"]
    assert all(hasattr(spec, str(field)) for field in fields)


def test_an_attention_type_invented_next_year_is_refused() -> None:
    assert not Generous.supports_attn_type("telepath")
    assert {kind for kind in AttentionType if Generous.supports_attn_type(kind)} == set(AttentionType)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_supported_dtypes_may_be_torch_dtypes(dtype: str) -> None:
    backend = variant(supported_dtypes=(torch.float16, "torch.bfloat16", torch.float64))
    reasons = backend.validate_configuration(LayerSpec(**SIZES, dtype=dtype), H100)
    if dtype == "float32":
        assert reasons == ["dtype not supported: float32 is not one of float16, bfloat16, float64"]
    else:
        assert reasons == []


def test_what_is_no_dtype_is_charged_to_the_declaration() -> None:
    with pytest.raises(SpecError) as caught:
        variant(supported_dtypes=(16,)).validate_configuration(SPEC, H100)
    assert caught.value.field == "supported_dtypes"
