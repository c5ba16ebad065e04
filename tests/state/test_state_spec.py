"""A LayerSpec with a state: the fields that go with it, its pages in bytes, and the backends that refuse it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from families import FAMILIES

import attnplug
from attnplug.core import LayerSpec, LayerTensors, SparseSpec
from attnplug.core.interface.answers import serving_class
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.state.caches import StateCacheSpec, state_cache_for
from attnplug.core.state.dims import StateDims
from attnplug.errors import PolicyError, SpecError
from attnplug.registry.default import get_registry

GDN: dict[str, Any] = {
    "num_heads": 32,
    "num_kv_heads": 16,
    "head_size": 128,
    "state": StateDims(rule="delta", decay="head"),
}
CONV: dict[str, Any] = {
    "num_heads": 8192,
    "num_kv_heads": 8192,
    "head_size": 1,
    "state": StateDims(rule="conv", width=4),
}


@pytest.mark.parametrize(
    "field",
    [
        {"sliding_window": 8},
        {"chunk_size": 8},
        {"logits_soft_cap": 3.0},
        {"has_sinks": True},
        {"has_alibi": True},
        {"sparse": SparseSpec("token_topk", 8)},
        {"mm_prefix": True},
        {"direct_kv": True},
        {"needs_lse": True},
        {"causal": False},
    ],
    ids=str,
)
def test_a_field_without_meaning_is_refused(field: dict[str, Any]) -> None:
    name = "window" if "sliding_window" in field else next(iter(field))
    with pytest.raises(SpecError, match=rf"{name}=.* means nothing beside state; leave it out"):
        LayerSpec(**GDN, **field)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"attn_type": "encoder", "causal": True}, "is for decoder layers, not encoder"),
        ({"kv_cache_dtype": "fp8"}, "of a state must be one of auto, float32, bfloat16, float16"),
        ({"state": "delta"}, "must be a StateDims or None"),
        ({"state": StateDims(rule="conv", width=4)}, "head_size=128 must be 1 with rule conv"),
    ],
    ids=str,
)
def test_a_value_that_no_state_has_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        LayerSpec(**{**GDN, **fields})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rule": "gated"}, "state.rule='gated' must be one of linear, delta, conv"),
        ({"rule": "delta"}, "state.decay=None must be one of head, row"),
        ({"rule": "delta", "decay": "head", "width": 4}, "state.width=4 must be None with rule delta"),
        ({"rule": "conv", "width": 1}, "state.width=1"),
        ({"rule": "conv", "width": 4, "decay": "row"}, "state.decay='row' must be None with rule conv"),
        ({"rule": "conv", "width": 4, "activation": "gelu"}, "state.activation='gelu' must be one of silu"),
        ({"rule": "delta", "decay": "head", "drafts": -1}, "state.drafts=-1"),
    ],
    ids=str,
)
def test_a_rule_names_its_own_parts(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        StateDims(**fields)
    assert text in str(caught.value)


def test_auto_is_float32_for_a_recurrence_and_the_dtype_for_a_convolution() -> None:
    assert LayerSpec(**GDN).resolved_kv_cache_dtype == "float32"
    assert LayerSpec(**CONV).resolved_kv_cache_dtype == "bfloat16"
    assert LayerSpec(**GDN, kv_cache_dtype="bfloat16").resolved_kv_cache_dtype == "bfloat16"


def test_a_page_has_the_bytes_of_the_state() -> None:
    assert state_cache_for(LayerSpec(**GDN)) == StateCacheSpec((32, 128, 128), "float32")
    pages = [state_cache_for(LayerSpec(**fields)) for fields in (GDN, CONV)]
    # The two layers of a mixer of Qwen3-Next.
    assert sum(page.page_size_bytes for page in pages if page) == 2_146_304
    assert kv_cache_spec_for(LayerSpec(**GDN), 16) is None
    assert state_cache_for(LayerSpec(num_heads=4, num_kv_heads=4, head_size=64)) is None


def test_json_keeps_the_rule() -> None:
    for spec in FAMILIES.values():
        assert LayerSpec.from_dict(spec.to_dict()) == spec


def test_every_backend_but_those_that_declare_the_rule_refuses() -> None:
    rows = random.Random(4)
    specs = [spec.replace(block_size=rows.choice([None, 64])) for spec in FAMILIES.values() for _ in range(8)]
    served = set()
    for device in ("cpu", "sm80", "sm90", "sm100", "rocm:9.4", "xpu", "mps"):
        for spec in specs:
            decision = attnplug.explain(spec, device, assume_installed="all")
            assert spec.state is not None
            for candidate in decision.candidates:
                offer = get_registry().plugins.find(candidate.name)[0]
                declares = serving_class(offer.backend, spec).supported_state_rules
                assert not (candidate.accepted and spec.state.rule not in declares)
                if not declares:
                    assert "feature.state" in [reason.code for reason in candidate.reasons]
                served |= {candidate.name} if candidate.accepted else set()
    assert served == {"TORCH", "TRITON"}


def test_a_rule_for_all_layers_is_for_attention_alone() -> None:
    layers = {"a": LayerSpec(num_heads=4, num_kv_heads=4, head_size=64), "s": LayerSpec(**GDN)}
    kwargs: Any = {"assume_installed": "all"}
    chosen = attnplug.select_layers(layers, "sm90", backend="FLASHINFER", **kwargs)
    assert {name: (each.backend, each.rule) for name, each in chosen.items()} == {
        "a": ("FLASHINFER", "FLASHINFER"),
        "s": ("TRITON", None),
    }
    named = attnplug.select_layers(layers, "sm90", backend="FLASHINFER,state=TORCH", **kwargs)
    assert named["s"].rule == "state=TORCH"
    # In a call for one layer, the name means that layer.
    assert not attnplug.explain(layers["s"], "sm90", backend="FLASHINFER", **kwargs)
    with pytest.raises(PolicyError, match=r"matches none of 1 layers \(kinds here: state\)"):
        attnplug.select_layers({"s": layers["s"]}, "sm90", backend="FLASHINFER", **kwargs)


def test_a_convolution_requires_its_weight() -> None:
    import torch

    spec = FAMILIES["conv"]
    LayerTensors(conv_weight=torch.zeros(7, 4)).check(spec)
    with pytest.raises(SpecError, match=r"conv_weight=None is required with rule conv: of shape \(7, 4\)"):
        LayerTensors().check(spec)
    with pytest.raises(SpecError, match=r"conv_weight=\(4, 7\) must be of shape \(7, 4\)"):
        LayerTensors(conv_weight=torch.zeros(4, 7)).check(spec)
    with pytest.raises(SpecError, match=r"conv_weight='given' is for layers with rule conv"):
        LayerTensors(conv_weight=torch.zeros(3, 4)).check(FAMILIES["kda"])
