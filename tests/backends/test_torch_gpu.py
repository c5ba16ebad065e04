"""TORCH on a GPU: the same answers as the oracle's, with lengths that only the device knows."""

from __future__ import annotations

import pytest

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import LayerSpec
from attnplug.testing import (
    Batch,
    assert_close,
    assert_lse_close,
    direct_batch,
    paged_batch,
    run_batch,
    tolerance,
)

pytestmark = pytest.mark.gpu

LENS = ([1, 3, 20, 0, 12, 1, 300, 3, 600, 1], [33, 29, 20, 9, 12, 1, 700, 64, 600, 0])


def check(batch: Batch) -> None:
    found, lse = run_batch(TorchBackend, batch)
    expected, bound = batch.oracle(), tolerance(batch.spec)
    tokens = batch.common.num_actual_tokens
    assert_close(found[:tokens], expected.output, bound.output)
    assert found[tokens:].isnan().all()
    if lse is not None:
        assert_lse_close(lse[:tokens], expected.lse, bound.lse)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"head_size": 80},
        {"head_size": 288},
        {"head_size_v": 128},
        {"num_kv_heads": 1},
        {"sliding_window": 40},
        {"chunk_size": 128},
        {"logits_soft_cap": 5.0, "has_sinks": True, "needs_lse": True},
        {"has_alibi": True},
        {"causal": False, "window": (50, 9)},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2", "sliding_window": 40},
        {"kv_cache_dtype": "float32"},
    ],
    ids=str,
)
def test_pages_are_attended(asked: dict[str, object], layout: str, dtype: str) -> None:
    sizes = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": dtype}
    spec = LayerSpec(**{**sizes, **asked})
    batch = paged_batch(
        spec, *LENS, layout=layout, padding=3, k_scale=0.125, v_scale=0.5, drop_window=True, device="cuda"
    )
    batch.common.seq_lens_host = None
    check(batch)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("asked", [{}, {"sliding_window": 40}, {"has_sinks": True}], ids=str)
def test_direct_keys_are_attended(asked: dict[str, object], dtype: str) -> None:
    spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, dtype=dtype, direct_kv=True, **asked)
    check(direct_batch(spec, [1, 30, 200], [900, 64, 400], key_lens=[80, 64, 300], device="cuda"))


@pytest.mark.parametrize("attn_type", ["encoder_only", "encoder_decoder"])
def test_encoders_and_cross_attention_see_all_keys(attn_type: str) -> None:
    spec = LayerSpec(num_heads=8, num_kv_heads=2, head_size=64, dtype="bfloat16", attn_type=attn_type)
    if attn_type == "encoder_only":
        check(direct_batch(spec, [5, 200], [5, 200], device="cuda"))
    else:
        check(paged_batch(spec, [5, 200], [70, 30], device="cuda"))
