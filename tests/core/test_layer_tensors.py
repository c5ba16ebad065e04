"""LayerTensors: exactly what a spec asks for, in its shape."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spec_strategies import SIZES

from attnplug.core import AttentionLayer, LayerSpec, LayerTensors
from attnplug.errors import SpecError

HEADS = SIZES["num_heads"]
PLAIN = LayerSpec(**SIZES)
ASKING = {
    "sinks": LayerSpec(**SIZES, has_sinks=True),
    "alibi_slopes": LayerSpec(**SIZES, has_alibi=True),
}
FLAGS = {"sinks": "has_sinks", "alibi_slopes": "has_alibi"}


def refusal(spec: LayerSpec, **tensors: Any) -> str:
    with pytest.raises(SpecError) as caught:
        LayerTensors(**tensors).check(spec)
    return str(caught.value)


def test_a_spec_that_asks_for_nothing_needs_nothing() -> None:
    LayerTensors().check(PLAIN)
    assert (LayerTensors().k_scale, LayerTensors().v_scale) == (1.0, 1.0)


@pytest.mark.parametrize("field", ASKING)
def test_what_is_asked_and_given_passes(field: str) -> None:
    LayerTensors(**{field: torch.zeros(HEADS)}).check(ASKING[field])


@pytest.mark.parametrize("field", ASKING)
def test_what_is_asked_and_missing_is_refused(field: str) -> None:
    text = refusal(ASKING[field])
    assert text.startswith(f"{field}=None")
    assert f"the spec says {FLAGS[field]}=True" in text


@pytest.mark.parametrize("field", ASKING)
def test_what_is_given_and_not_asked_is_refused(field: str) -> None:
    assert f"the spec says {FLAGS[field]}=False" in refusal(PLAIN, **{field: torch.zeros(HEADS)})


@pytest.mark.parametrize("field", ASKING)
@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(HEADS + 1),
        torch.zeros(1, HEADS),
        torch.zeros(()),
        torch.zeros(HEADS, dtype=torch.float64),
        torch.zeros(HEADS, dtype=torch.bfloat16),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_another_shape_or_dtype_is_refused(field: str, tensor: torch.Tensor) -> None:
    text = refusal(ASKING[field], **{field: tensor})
    assert f"must be torch.float32 ({HEADS},)" in text
    assert str(tensor.dtype) in text


@pytest.mark.parametrize("field", ASKING)
def test_a_list_is_no_tensor(field: str) -> None:
    assert "must be a float32 tensor of 8 elements" in refusal(ASKING[field], **{field: [0.0] * HEADS})


@pytest.mark.parametrize("field", ["k_scale", "v_scale"])
@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, "1.0", None])
def test_a_scale_is_finite_and_above_zero(field: str, scale: object) -> None:
    text = refusal(PLAIN, **{field: scale})
    assert text.startswith(f"{field}=")
    assert "must be a finite number above 0" in text


@pytest.mark.parametrize("field", ["k_scale", "v_scale"])
def test_a_scale_is_one_number_for_the_whole_tensor(field: str) -> None:
    for scale in (torch.tensor(0.5), torch.tensor([0.5]), 0.5, 2):
        LayerTensors(**{field: scale}).check(PLAIN.replace(kv_cache_dtype="fp8"))
    assert "scales are per tensor" in refusal(PLAIN, **{field: torch.ones(HEADS)})


@pytest.mark.parametrize("field", ["k_scale", "v_scale"])
def test_a_scale_that_no_storage_would_use_is_refused(field: str) -> None:
    assert "would be ignored" in refusal(PLAIN, **{field: 0.5})
    LayerTensors(**{field: 1.0}).check(PLAIN)


def test_any_object_with_an_impl_and_scales_is_a_layer() -> None:
    names = ["q_scale", "k_scale", "v_scale", "prob_scale", "q_scale_float", "k_scale_float", "v_scale_float"]
    layer = SimpleNamespace(impl=None, **{f"_{name}": 1.0 for name in names})
    assert isinstance(layer, AttentionLayer)
    del layer._v_scale_float
    assert not isinstance(layer, AttentionLayer)
