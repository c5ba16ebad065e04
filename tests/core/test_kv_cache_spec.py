"""What a layer's KV cache holds, and the bytes of its pages."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from spec_strategies import MLA_SIZES, SIZES, specs

from attnplug.core import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    LayerSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.errors import SpecError

LEAST: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("changes", "page"),
    [
        ({}, 65_536),  # 16 tokens x 8 heads x (128 + 128) elements x 2 bytes
        ({"dtype": "float32"}, 131_072),
        ({"dtype": "fp8_e4m3"}, 32_768),
        ({"dtype": "fp8_e5m2"}, 32_768),
        ({"dtype": "int8"}, 32_768),
        ({"head_size_v": 64}, 49_152),  # 16 x 8 x (128 + 64) x 2
        ({"block_size": 1, "num_kv_heads": 1, "head_size": 80}, 320),  # (80 + 80) x 2
        ({"dtype": "fp8", "padding": 1024}, 33_792),  # 32768 + 1024
        ({"dtype": "int8_token_head"}, 33_792),  # 16 x 8 x 2 x (128 + 4)
        ({"dtype": "nvfp4"}, 18_432),  # 16 x 8 x 2 x (64 + 8)
        ({"dtype": "rotated4"}, 16_896),  # 16 x 8 x 2 x (64 + 2)
    ],
)
def test_a_page_holds_k_and_v_of_its_tokens(changes: dict[str, Any], page: int) -> None:
    assert FullAttentionSpec(**{**LEAST, **changes}).page_size_bytes == page


def test_a_page_of_latents_holds_one_vector_per_token() -> None:
    latent = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, head_size_v=512, dtype="bfloat16")
    assert latent.bytes_per_token == 1_152
    assert latent.page_size_bytes == 73_728  # 64 x 576 x 2
    assert dataclasses.replace(latent, dtype="fp8_e4m3").page_size_bytes == 36_864


def test_a_window_changes_which_tokens_stay_and_not_their_bytes() -> None:
    full = FullAttentionSpec(**LEAST)
    for other in (
        SlidingWindowSpec(**LEAST, sliding_window=128),
        ChunkedLocalAttentionSpec(**LEAST, chunk=128),
        CrossAttentionSpec(**LEAST),
    ):
        assert other.page_size_bytes == full.page_size_bytes
        assert other != full


def test_values_are_as_wide_as_keys_unless_said_otherwise() -> None:
    assert FullAttentionSpec(**LEAST).head_size_v == 128
    assert FullAttentionSpec(**LEAST, head_size_v=0).head_size_v == 128
    assert FullAttentionSpec(**LEAST) == FullAttentionSpec(**LEAST, head_size_v=128)


@pytest.mark.parametrize("field", ["block_size", "num_kv_heads", "head_size"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, None])
def test_sizes_are_integers_of_at_least_one(field: str, value: object) -> None:
    with pytest.raises(SpecError, match=f"{field}=.*at least 1"):
        FullAttentionSpec(**{**LEAST, field: value})


@pytest.mark.parametrize("value", [-1, False, 1.5])
def test_a_value_size_is_one_too(value: object) -> None:
    with pytest.raises(SpecError, match=r"head_size_v=.*at least 1"):
        FullAttentionSpec(**LEAST, head_size_v=value)  # type: ignore[arg-type]


def test_the_reach_of_a_cache_is_checked() -> None:
    with pytest.raises(SpecError, match="sliding_window=0"):
        SlidingWindowSpec(**LEAST, sliding_window=0)
    with pytest.raises(SpecError, match="chunk=-1"):
        ChunkedLocalAttentionSpec(**LEAST, chunk=-1)
    with pytest.raises(SpecError, match="padding=-1 must be an integer of at least 0"):
        FullAttentionSpec(**LEAST, padding=-1)


@pytest.mark.parametrize("dtype", ["auto", "float64", "of_next_year", ""])
def test_a_storage_dtype_must_have_a_size(dtype: str) -> None:
    with pytest.raises(SpecError, match=f"dtype='{dtype}'"):
        FullAttentionSpec(**{**LEAST, "dtype": dtype})


def test_values_become_exact() -> None:
    spec = FullAttentionSpec(**{**LEAST, "dtype": torch.float8_e4m3fn, "block_size": np.int64(16)})
    assert (spec.dtype, type(spec.block_size)) == ("fp8_e4m3", int)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert {spec: 1}[FullAttentionSpec(**{**LEAST, "dtype": "fp8_e4m3"})] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.block_size = 32  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "kind", "reach"),
    [
        ({}, FullAttentionSpec, {}),
        ({"causal": False, "window": (3, 3)}, FullAttentionSpec, {}),
        ({"attn_type": "encoder"}, FullAttentionSpec, {}),
        ({"sliding_window": 128}, SlidingWindowSpec, {"sliding_window": 128}),
        ({"window": (127, 0)}, SlidingWindowSpec, {"sliding_window": 128}),
        ({"chunk_size": 8192}, ChunkedLocalAttentionSpec, {"chunk": 8192}),
        ({"attn_type": "encoder_decoder"}, CrossAttentionSpec, {}),
        (MLA_SIZES, MLAAttentionSpec, {}),
    ],
    ids=str,
)
def test_each_kind_of_layer_keeps_its_kind_of_cache(
    arguments: dict[str, Any], kind: type[KVCacheSpec], reach: dict[str, int]
) -> None:
    spec = LayerSpec(**{**SIZES, **arguments})
    cache = kv_cache_spec_for(spec, 32)
    assert type(cache) is kind
    assert (cache.block_size, cache.num_kv_heads, cache.head_size, cache.head_size_v, cache.dtype) == (
        32,
        spec.num_kv_heads,
        spec.head_size,
        spec.head_size_v,
        "bfloat16",
    )
    assert {name: getattr(cache, name) for name in reach} == reach


def test_storage_is_what_the_kv_cache_dtype_stands_for() -> None:
    cache = kv_cache_spec_for(LayerSpec(**SIZES, kv_cache_dtype="fp8"), 16)
    assert cache is not None
    assert (cache.dtype, cache.page_size_bytes) == ("fp8_e4m3", 16 * 2 * 128)


def test_direct_k_and_v_need_no_cache() -> None:
    assert kv_cache_spec_for(LayerSpec(**SIZES, direct_kv=True), 16) is None


def test_a_block_size_that_a_layer_fixed_is_not_rewritten() -> None:
    fixed = LayerSpec(**SIZES, block_size=16)
    assert kv_cache_spec_for(fixed, 16) is not None
    with pytest.raises(SpecError, match="block_size=32 is not the layer's own block_size=16"):
        kv_cache_spec_for(fixed, 32)


@given(specs(), st.integers(1, 256))
def test_a_page_is_a_whole_number_of_tokens(spec: LayerSpec, block_size: int) -> None:
    cache = kv_cache_spec_for(spec, spec.block_size or block_size)
    assert (cache is None) is not spec.has_pages
    if cache is not None:
        width = spec.head_size if spec.mla else spec.head_size + spec.head_size_v
        sizes = {"float32": 4, "float16": 2, "bfloat16": 2}
        element = sizes.get(spec.resolved_kv_cache_dtype, 1)
        assert cache.page_size_bytes == cache.block_size * spec.num_kv_heads * width * element


def test_a_configuration_is_a_value() -> None:
    group = KVCacheGroupSpec(("layers.0", "layers.1"), FullAttentionSpec(**LEAST))
    tensor = KVCacheTensor(size=10 * 65_536, shared_by=("layers.0",))
    config = KVCacheConfig(num_blocks=10, kv_cache_tensors=(tensor,), kv_cache_groups=(group,))
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(dataclasses.replace(config))
