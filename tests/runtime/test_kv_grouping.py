"""Which layers share a block table, and which share memory: models counted by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_layers import (
    BLOCK,
    PAGE,
    SLIDING,
    caches,
    every,
    gemma_3,
    gpt_oss,
    layer,
    llama,
    llama_4,
    model,
    whisper,
)

from attnplug.core import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    Feature,
    FullAttentionSpec,
    KVCacheConfig,
    LayerSpec,
    MLADims,
    SlidingWindowSpec,
)
from attnplug.core.errors import LayoutError, SpecError
from attnplug.runtime import (
    get_kv_cache_spec,
    group_kv_caches,
    num_padding_layers,
    unify_page_sizes,
    with_num_blocks,
)


def group_sizes(config: KVCacheConfig) -> list[tuple[str, int]]:
    return [(type(g.kv_cache_spec).__name__, len(g.layer_names)) for g in config.kv_cache_groups]


def owners(config: KVCacheConfig) -> list[tuple[str, ...]]:
    return [tensor.shared_by for tensor in config.kv_cache_tensors]


# get_kv_cache_spec


def test_each_layer_gets_the_cache_of_its_kind():
    dims = MLADims(q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)
    specs = model([{}, {"sliding_window": 5}, {"chunk_size": 32}, {"attn_type": "encoder_decoder"}])
    specs["mla"] = layer(num_kv_heads=1, head_size=10, mla=dims)
    found = get_kv_cache_spec(specs, 16)
    assert [type(spec).__name__ for spec in found.values()] == [
        "FullAttentionSpec",
        "SlidingWindowSpec",
        "ChunkedLocalAttentionSpec",
        "CrossAttentionSpec",
        "MLAAttentionSpec",
    ]
    assert found["layers.1"].sliding_window == 5
    assert found["layers.2"].chunk == 32
    assert {spec.block_size for spec in found.values()} == {16}


def test_layers_with_direct_kv_keep_no_cache():
    assert set(get_kv_cache_spec(whisper(), 16)) == {name for name in whisper() if "decoder." in name}


def test_a_layer_that_fixed_another_block_size_is_refused_by_name():
    with pytest.raises(SpecError, match=r"block_size of layer layers\.1=16 is not the layer's own .*=32"):
        get_kv_cache_spec(model([{}, {"block_size": 32}]), 16)


# group_kv_caches


def test_layers_of_one_kind_are_one_group_with_a_tensor_each():
    config = group_kv_caches(caches(llama), 7)
    assert group_sizes(config) == [("FullAttentionSpec", 32)]
    assert owners(config) == [(f"layers.{i}",) for i in range(32)]
    assert {tensor.size for tensor in config.kv_cache_tensors} == {7 * PAGE}
    assert config.num_blocks == 7
    assert num_padding_layers(config) == 0


def test_gpt_oss_pairs_each_sliding_layer_with_a_full_one():
    config = group_kv_caches(caches(gpt_oss), 5)
    assert group_sizes(config) == [("SlidingWindowSpec", 12), ("FullAttentionSpec", 12)]
    assert owners(config) == [(f"layers.{2 * p}", f"layers.{2 * p + 1}") for p in range(12)]
    assert num_padding_layers(config) == 0


def test_gemma_3_has_six_sliding_groups_beside_the_full_one_over_ten_tensors():
    config = group_kv_caches(caches(gemma_3), 5)
    # 52 sliding layers in ceil(52 / 10) = 6 groups: four of 9 layers, two of 8.
    assert group_sizes(config) == [("SlidingWindowSpec", n) for n in (9, 9, 9, 9, 8, 8)] + [
        ("FullAttentionSpec", 10)
    ]
    assert len(config.kv_cache_tensors) == 10
    assert num_padding_layers(config) == 7 * 10 - 62
    sliding = [name for index, name in enumerate(gemma_3()) if index % 6 != 5]
    assert [g.layer_names for g in config.kv_cache_groups[:6]] == [tuple(sliding[g::6]) for g in range(6)]
    # Every group's first layer in the first tensor; in the last only the full group has a tenth.
    assert owners(config)[0] == tuple(g.layer_names[0] for g in config.kv_cache_groups)
    assert owners(config)[8] == tuple(
        g.layer_names[8] for g in config.kv_cache_groups if len(g.layer_names) > 8
    )
    assert owners(config)[9] == ("layers.59",)


def test_llama_4_has_three_chunked_groups_beside_the_full_one():
    config = group_kv_caches(caches(llama_4), 5)
    assert group_sizes(config) == [("ChunkedLocalAttentionSpec", 12)] * 3 + [("FullAttentionSpec", 12)]
    assert len(config.kv_cache_tensors) == 12
    assert all(len(shared) == 4 for shared in owners(config))
    assert num_padding_layers(config) == 0


def test_whisper_pairs_self_and_cross_attention():
    config = group_kv_caches(caches(whisper), 5)
    assert group_sizes(config) == [("FullAttentionSpec", 4), ("CrossAttentionSpec", 4)]
    assert owners(config)[0] == ("decoder.layers.0.self_attn", "decoder.layers.0.encoder_attn")


def test_nearly_equal_kinds_are_padded_to_one_group_each():
    # 10 and 9 layers: one group of each with one layer's pages unused, not ten groups of small size.
    config = group_kv_caches(get_kv_cache_spec(model([{}] * 10 + [SLIDING] * 9), BLOCK))
    assert [size for _, size in group_sizes(config)] == [10, 9]
    assert num_padding_layers(config) == 1
    # 5 and 4 are too far apart for that: 5 become 3 and 2.
    config = group_kv_caches(get_kv_cache_spec(model([{}] * 5 + [SLIDING] * 4), BLOCK))
    assert [size for _, size in group_sizes(config)] == [3, 2, 4]
    assert num_padding_layers(config) == 3 * 4 - 9


def test_a_model_without_caches_has_no_groups():
    assert group_kv_caches({}) == KVCacheConfig(1, (), ())
    assert num_padding_layers(group_kv_caches({})) == 0


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    num_blocks=st.integers(1, 1000),
)
def test_every_layer_has_one_group_and_one_tensor_that_no_other_of_its_group_has(counts, order, num_blocks):
    kinds = [{"sliding_window": kind + 1} for kind, count in enumerate(counts) for _ in range(count)]
    order.shuffle(kinds)
    specs = get_kv_cache_spec(model(kinds), BLOCK)
    config = group_kv_caches(specs, num_blocks)
    grouped = [name for group in config.kv_cache_groups for name in group.layer_names]
    held = [name for shared in owners(config) for name in shared]
    assert sorted(grouped) == sorted(held) == sorted(specs)
    for group in config.kv_cache_groups:
        assert {specs[name] for name in group.layer_names} == {group.kv_cache_spec}
        places = [p for p, shared in enumerate(owners(config)) for n in shared if n in group.layer_names]
        assert len(set(places)) == len(places)
    assert {tensor.size for tensor in config.kv_cache_tensors} == {PAGE * num_blocks}
    padding = len(config.kv_cache_groups) * len(config.kv_cache_tensors) - len(specs)
    assert num_padding_layers(config) == padding


# Sharing


def test_a_sharing_layer_is_in_its_targets_group_and_tensor():
    specs = caches(gpt_oss)
    config = group_kv_caches(specs, 5, {"layers.22": "layers.20", "layers.23": "layers.21"})
    assert group_sizes(config) == [("SlidingWindowSpec", 12), ("FullAttentionSpec", 12)]
    assert len(config.kv_cache_tensors) == 11
    assert owners(config)[-1] == ("layers.20", "layers.22", "layers.21", "layers.23")
    assert "layers.22" in config.kv_cache_groups[0].layer_names
    assert num_padding_layers(config) == 0


def test_several_layers_can_share_one_target():
    config = group_kv_caches(caches(llama), 1, {f"layers.{i}": "layers.3" for i in range(4, 32)})
    assert [len(shared) for shared in owners(config)] == [1, 1, 1, 29]
    assert group_sizes(config) == [("FullAttentionSpec", 32)]


@pytest.mark.parametrize(
    ("sharing", "said"),
    [
        (
            {"layers.1": "layers.99"},
            "kv_sharing['layers.1']='layers.99' is not a layer with pages of its own",
        ),
        (
            {"layers.2": "layers.1", "layers.1": "layers.0"},
            "['layers.2']='layers.1' is not a layer with pages",
        ),
        ({"layers.1": "layers.1"}, "['layers.1']='layers.1' is not a layer with pages of its own"),
        ({"layers.99": "layers.0"}, "kv_sharing='layers.99' is not a layer with a cache"),
        ({"layers.1": "layers.0"}, "['layers.1']='layers.0' has another cache than layers.1"),
    ],
)
def test_sharing_that_cannot_be_is_refused(sharing, said):
    with pytest.raises(LayoutError) as error:
        group_kv_caches(caches(gpt_oss), 1, sharing)
    assert said in str(error.value)


# Page sizes and blocks


def test_pages_of_unlike_size_are_refused_with_a_layer_of_each():
    specs = get_kv_cache_spec(model([{}, {"num_kv_heads": 4}]), BLOCK)
    with pytest.raises(LayoutError) as error:
        group_kv_caches(specs)
    assert f"{PAGE} bytes (layer layers.0), {2 * PAGE} bytes (layer layers.1)" in str(error.value)
    assert "unify_page_sizes" in str(error.value)


def test_smaller_pages_get_more_tokens():
    specs = get_kv_cache_spec(model([{}, {"num_kv_heads": 4}, {"kv_cache_dtype": "fp8"}]), BLOCK)
    unified = unify_page_sizes(specs)
    assert [spec.block_size for spec in unified.values()] == [2 * BLOCK, BLOCK, 4 * BLOCK]
    assert {spec.page_size_bytes for spec in unified.values()} == {2 * PAGE}
    assert [type(a) for a in unified.values()] == [type(b) for b in specs.values()]
    assert len(group_kv_caches(unified).kv_cache_groups) == 3


def test_equal_pages_stay_as_they_are():
    specs = caches(gemma_3)
    assert unify_page_sizes(specs) == specs
    assert unify_page_sizes({}) == {}


@pytest.mark.parametrize(
    ("other", "blocks"), [("int8_token_head", (176, 336)), ("nvfp4", (144, 512)), ("rotated4", (96, 368))]
)
def test_pages_of_unlike_formats_are_equal_with_little_padding(other, blocks):
    plain = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    unified = unify_page_sizes({"plain": plain, "coded": dataclasses.replace(plain, dtype=other)})
    assert tuple(cache.block_size for cache in unified.values()) == blocks
    page = unified["plain"].page_size_bytes
    for cache in unified.values():
        assert cache.page_size_bytes == page
        assert cache.padding <= 0.02 * page
    assert unify_page_sizes(unified) == unified


def test_pages_that_do_not_divide_the_largest_get_their_least_common_multiple():
    specs = get_kv_cache_spec(model([{"num_heads": 6, "num_kv_heads": 3}, {}]), BLOCK)
    unified = unify_page_sizes(specs)
    assert [spec.block_size for spec in unified.values()] == [2 * BLOCK, 3 * BLOCK]
    assert {spec.page_size_bytes for spec in unified.values()} == {3 * PAGE}


def test_latents_beside_heads_have_pages_of_equal_bytes():
    specs = {
        "latents": LayerSpec(num_heads=16, **Feature.MLA.fields(576)),
        "heads": LayerSpec(num_heads=32, num_kv_heads=8, head_size=128),
    }
    unified = unify_page_sizes(get_kv_cache_spec(specs, 16))
    assert [spec.block_size for spec in unified.values()] == [512, 144]
    assert {spec.page_size_bytes for spec in unified.values()} == {512 * 1152}


def test_equal_pages_that_are_far_larger_than_the_largest_are_refused():
    specs = get_kv_cache_spec(
        model([{"num_heads": 17, "num_kv_heads": 17}, {"num_heads": 18, "num_kv_heads": 18}]), BLOCK
    )
    with pytest.raises(LayoutError) as error:
        unify_page_sizes(specs)
    said = f"page_size_bytes={17 * PAGE // 2} bytes of layer layers.0 do not divide the largest page of {9 * PAGE}"
    assert f"{said} bytes, and equal pages would have {153 * PAGE}; choose" in str(error.value)


def test_a_pool_of_another_size_has_the_same_groups():
    config = group_kv_caches(caches(gemma_3), 3)
    assert with_num_blocks(config, 100) == group_kv_caches(caches(gemma_3), 100)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_has_at_least_the_null_block(num_blocks):
    with pytest.raises(LayoutError, match=f"num_blocks={num_blocks} must be at least 1"):
        group_kv_caches(caches(llama), num_blocks)
    with pytest.raises(LayoutError, match=f"num_blocks={num_blocks} must be at least 1"):
        with_num_blocks(group_kv_caches(caches(llama)), num_blocks)
    with pytest.raises(LayoutError, match=f"config.num_blocks={num_blocks} must be at least 1"):
        with_num_blocks(KVCacheConfig(num_blocks, (), ()), 5)


def test_the_kinds_used_here_are_what_they_are_called():
    kinds = {
        type(group.kv_cache_spec)
        for of in (gpt_oss, llama_4, whisper)
        for group in group_kv_caches(caches(of)).kv_cache_groups
    }
    assert kinds == {SlidingWindowSpec, FullAttentionSpec, ChunkedLocalAttentionSpec, CrossAttentionSpec}
    assert every(3, 2, {"a": 1}, {"b": 1}) == [{"a": 1}, {"b": 1}, {"a": 1}]
