"""Every element type of queries and of the cache, against the oracle on what the cache gives back."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import LayerSpec, LayerTensors
from attnplug.testing import assert_close, paged_batch, run_batch, tolerance

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32}
LENS = ([1, 3, 20, 40, 25], [70, 9, 20, 61, 25])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("stored", ["auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(
    "features", [{}, {"logits_soft_cap": 5.0, "sliding_window": 12}], ids=["plain", "capped"]
)
def test_every_storage_serves_every_dtype(dtype: str, stored: str, features: dict[str, object]) -> None:
    spec = LayerSpec(**SIZES, dtype=dtype, kv_cache_dtype=stored, **features)
    batch = paged_batch(spec, *LENS, k_scale=0.125, v_scale=0.5)
    found, _ = run_batch(TorchBackend, batch)
    assert_close(found, batch.oracle().output, tolerance(spec).output)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("stored", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("head_size_v", [32, 24])
def test_a_raw_fp8_pool_is_the_same_as_a_typed_one(layout: str, stored: str, head_size_v: int) -> None:
    spec = LayerSpec(**SIZES, dtype="float32", kv_cache_dtype=stored, head_size_v=head_size_v)
    typed = paged_batch(spec, *LENS, layout=layout, k_scale=0.125, v_scale=0.5)
    assert typed.kv_cache is not None
    raw = dataclasses.replace(typed, kv_cache=typed.kv_cache.clone().view(torch.uint8))
    expected, _ = run_batch(TorchBackend, typed)
    found, _ = run_batch(TorchBackend, raw)
    assert torch.equal(found, expected)


def test_fp8_is_exact_but_for_its_rounding() -> None:
    spec = LayerSpec(**SIZES, dtype="float32", kv_cache_dtype="fp8")
    batch = paged_batch(spec, *LENS, k_scale=0.125, v_scale=0.5)
    found, _ = run_batch(TorchBackend, batch)
    assert_close(found, batch.oracle().output, 1e-5)


@pytest.mark.parametrize(("stored", "limit"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_fp8_writes_clamp_to_the_finite_maximum(stored: str, limit: float) -> None:
    spec = LayerSpec(**SIZES, dtype="float32", kv_cache_dtype=stored)
    impl = TorchBackend.get_impl_cls().from_spec(
        spec, backend=TorchBackend, layer_name="layer", tensors=LayerTensors(k_scale=0.5, v_scale=2.0)
    )
    cache = torch.zeros(2, 2, 16, 2, 32, dtype=torch.uint8)
    huge = torch.full((1, 2, 32), 1e6)
    impl.update_kv_cache(None, huge, -huge, cache, torch.tensor([16]))
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[stored]
    assert (cache.view(dtype)[1, 0, 0].float() == limit).all()
    assert (cache.view(dtype)[1, 1, 0].float() == -limit).all()


def test_the_layers_scales_come_before_the_impls_own() -> None:
    spec = LayerSpec(**SIZES, dtype="float32", kv_cache_dtype="fp8")
    batch = paged_batch(spec, *LENS, k_scale=0.125, v_scale=0.5)
    elsewhere = dataclasses.replace(batch, tensors=LayerTensors(k_scale=3.0, v_scale=7.0))
    layer = SimpleNamespace(_k_scale_float=0.125, _v_scale_float=0.5)
    found, _ = run_batch(TorchBackend, elsewhere, layer=layer)
    assert_close(found, batch.oracle().output, 1e-5)


def test_scales_may_be_tensors_of_one_element() -> None:
    spec = LayerSpec(**SIZES, dtype="float32", kv_cache_dtype="fp8")
    batch = paged_batch(spec, *LENS, k_scale=0.125, v_scale=0.5)
    tensors = LayerTensors(k_scale=torch.tensor([0.125]), v_scale=torch.tensor(0.5))
    found, _ = run_batch(TorchBackend, dataclasses.replace(batch, tensors=tensors))
    assert_close(found, batch.oracle().output, 1e-5)


def test_a_layers_scales_do_not_touch_a_cache_that_is_not_quantised() -> None:
    spec = LayerSpec(**SIZES, dtype="float32")
    batch = paged_batch(spec, *LENS)
    layer = SimpleNamespace(_k_scale_float=0.125, _v_scale_float=0.5)
    found, _ = run_batch(TorchBackend, batch, layer=layer)
    assert_close(found, batch.oracle().output, 1e-5)
