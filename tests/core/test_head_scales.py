"""Scales of their own for KV heads: which layers have them, in which forms, and who serves them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import attnplug
from attnplug.core import LayerSpec, LayerTensors
from attnplug.core.errors import BackendUnavailableError, BatchError
from attnplug.core.features import Feature
from attnplug.core.impl import host_scale
from attnplug.core.mla.dims import MLADims
from attnplug.errors import SpecError
from attnplug.ops.checks import head_scales, kv_scales

SIZES: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 3, "head_size": 64}
ONE = LayerSpec(**SIZES, kv_cache_dtype="fp8")
SPEC = ONE.replace(head_scales=True)
BY_HEAD = torch.tensor([0.5, 2.0, 0.25])


def test_a_layer_asks_for_them_by_a_feature() -> None:
    assert SPEC.required_features() == Feature.FP8_KV | Feature.HEAD_SCALES
    assert LayerSpec.from_dict(SPEC.to_dict()) == SPEC


@pytest.mark.parametrize("stored", ["auto", "bfloat16", "nvfp4", "int8_token_head"])
def test_they_are_of_pages_of_8_bit_floats(stored: str) -> None:
    with pytest.raises(SpecError, match=r"head_scales=True needs pages of 8-bit floats, not kv_cache_dtype"):
        LayerSpec(**SIZES, kv_cache_dtype=stored, head_scales=True)


def test_layers_without_heads_in_pages_have_none() -> None:
    dims = MLADims(q_lora_rank=None, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
    for fields in ({"direct_kv": True}, {"mla": dims, "num_kv_heads": 1, "head_size": 80}):
        with pytest.raises(SpecError, match="head_scales=True needs heads in pages"):
            LayerSpec(**{**SIZES, **fields}, kv_cache_dtype="fp8", head_scales=True)


@pytest.mark.parametrize(
    "given",
    [BY_HEAD, tuple(BY_HEAD.tolist()), 0.5, torch.tensor([0.5]), torch.tensor(0.5), torch.tensor([[0.5]])],
)
def test_each_head_has_one_or_all_have_the_same(given: Any) -> None:
    LayerTensors(k_scale=given).check(SPEC)
    same = isinstance(given, float) or (isinstance(given, torch.Tensor) and given.numel() == 1)
    assert host_scale(given, SPEC) == ((0.5,) * 3 if same else (0.5, 2.0, 0.25))


@pytest.mark.parametrize(
    "given", [torch.ones(6), torch.ones(3, 1), torch.ones(2), (1.0, 1.0), (1.0, 2.0, 0.0)]
)
def test_other_shapes_and_values_are_refused(given: Any) -> None:
    with pytest.raises(
        SpecError, match=r"v_scale.*(must have the shape \(3,\)|must be a finite number above 0)"
    ):
        LayerTensors(v_scale=given).check(SPEC)


@pytest.mark.parametrize("given", [BY_HEAD, (0.5, 2.0, 0.25)])
def test_a_layer_that_does_not_declare_them_refuses_them(given: Any) -> None:
    with pytest.raises(
        SpecError, match=r"must have one element: scales are per tensor; declare .*head_scales=True"
    ):
        LayerTensors(k_scale=given).check(ONE)


def test_an_engines_tensors_count_where_its_host_has_one_number() -> None:
    engine: Any = SimpleNamespace(
        _k_scale=BY_HEAD, _v_scale=2 * BY_HEAD, _k_scale_float=2.0, _v_scale_float=4.0
    )
    assert head_scales(engine, LayerTensors(), SPEC) == (engine._k_scale, engine._v_scale)
    engine._k_scale_float, engine._v_scale_float = (1.0, 2.0, 3.0), (4.0, 5.0, 6.0)
    assert head_scales(engine, LayerTensors(), SPEC) == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    engine._v_scale_float = (4.0, 5.0)
    with pytest.raises(
        BatchError, match=r"layer._v_scale_float=.* must have 3 numbers, one for each KV head"
    ):
        head_scales(engine, LayerTensors(), SPEC)
    assert head_scales(None, LayerTensors(k_scale=BY_HEAD), SPEC) == (BY_HEAD, 1.0)
    with pytest.raises(BatchError, match=r"layer._k_scale=\(3,\) must have one element"):
        kv_scales(engine, LayerTensors())
    other: Any = SimpleNamespace(_k_scale=torch.ones(6), _v_scale=BY_HEAD)
    with pytest.raises(BatchError, match=r"layer._k_scale=\(6,\) must have one element, or be \(3,\)"):
        head_scales(other, LayerTensors(), SPEC)


@pytest.mark.parametrize("name", ["FLASHINFER", "FLASH_ATTN_2", "FLASH_ATTN_4"])
def test_backends_that_do_not_declare_them_refuse_in_words(name: str) -> None:
    with pytest.raises(BackendUnavailableError, match="head_scales not supported"):
        attnplug.select(SPEC, "h100", backend=name, assume_installed="all")


@pytest.mark.parametrize("device", ["h100", "cpu"])
def test_they_are_served_by_default(device: str) -> None:
    expected = {"h100": "TRITON", "cpu": "TORCH"}
    assert attnplug.select(SPEC, device, assume_installed="all").backend == expected[device]
