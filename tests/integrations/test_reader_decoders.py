"""Decoder families: what varies between their layers."""

from __future__ import annotations

import math

import pytest

from attnplug.core import LayerSpec, MLADims, SparseSpec
from attnplug.integrations.transformers import read_config

PLAIN = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16)


@pytest.mark.parametrize(
    "name", ["Llama", "Qwen3", "Cohere", "StableLm", "Granite", "Olmo2", "Glm4", "Starcoder2"]
)
def test_plain_families_are_plain(name, layers):
    specs = layers(name)

    assert [spec.replace(scale=0.25) for spec in specs] == [PLAIN.replace(scale=0.25)] * 4


def test_a_window_that_the_configuration_turns_off_is_none(layers):
    assert layers("Qwen2", sliding_window=16, use_sliding_window=False) == [PLAIN] * 4


def test_qwen_windows_only_the_layers_past_max_window_layers(layers):
    windowed = PLAIN.replace(window=(15, 0))

    specs = layers("Qwen2", sliding_window=16, use_sliding_window=True, max_window_layers=3)

    assert specs == [PLAIN, PLAIN, PLAIN, windowed]


@pytest.mark.parametrize("name", ["Mistral", "Mixtral", "Phi3", "Starcoder2"])
def test_families_without_layer_types_window_every_layer(name, layers):
    assert layers(name, sliding_window=16) == [PLAIN.replace(window=(15, 0))] * 4


@pytest.mark.parametrize("name", ["Llama", "Olmo2", "Granite"])
def test_a_window_that_the_class_does_not_use_is_not_made_up(name, layers):
    assert {spec.window for spec in layers(name, sliding_window=16)} == {(-1, 0)}


def test_layer_types_are_followed(layers):
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]

    windows = [spec.window for spec in layers("Cohere2", layer_types=kinds, sliding_window=8)]

    assert windows == [(-1, 0), (7, 0), (7, 0), (-1, 0)]


def test_granite_scales_by_its_attention_multiplier(layers):
    assert {spec.scale for spec in layers("Granite", attention_multiplier=0.0625)} == {0.0625}


def test_gemma_2_scales_by_its_query_scalar_and_caps(layers):
    specs = layers("Gemma2", query_pre_attn_scalar=64, attn_logit_softcapping=30.0)

    assert {(spec.scale, spec.logits_soft_cap) for spec in specs} == {(0.125, 30.0)}


def test_gemma_2_without_a_cap_has_none(layers):
    assert {spec.logits_soft_cap for spec in layers("Gemma2", attn_logit_softcapping=None)} == {None}


def test_gpt_2_may_scale_each_layer_by_its_index(layers):
    specs = layers("GPT2", scale_attn_by_inverse_layer_idx=True)

    assert [spec.scale for spec in specs] == pytest.approx([0.25, 0.125, 0.25 / 3, 0.0625])


def test_a_family_that_multiplies_its_queries_itself_has_the_whole_scale(layers):
    assert {spec.scale for spec in layers("OPT")} == {0.25}


def test_gpt_oss_has_sinks_in_every_layer(layers):
    specs = layers("GptOss", num_local_experts=2, num_experts_per_tok=1, sliding_window=8)

    assert [spec.has_sinks for spec in specs] == [True] * 4
    assert [spec.window for spec in specs] == [(7, 0), (-1, 0)] * 2


def test_layers_of_one_model_may_differ_in_kv_heads_value_size_and_sinks(layers):
    kinds = ["full_attention", "sliding_attention"] * 2

    full, sliding, *_ = layers(
        "MiMoV2Flash",
        v_head_dim=8,
        layer_types=kinds,
        sliding_window=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
    )

    assert (full.num_kv_heads, full.head_size, full.head_size_v, full.has_sinks) == (2, 16, 8, False)
    assert (sliding.num_kv_heads, sliding.head_size_v, sliding.has_sinks) == (4, 8, True)


def test_llama_4_chunks_the_layers_with_rope(layers):
    specs = layers("Llama4Text", attention_chunk_size=32, num_local_experts=2, intermediate_size_mlp=64)

    assert [spec.chunk_size for spec in specs] == [32, 32, 32, None]


def test_gemma_3n_layers_read_the_keys_of_an_earlier_layer_of_their_kind(small):
    kinds = ["sliding_attention", "full_attention"] * 3
    config = small(
        "Gemma3nText",
        num_hidden_layers=6,
        layer_types=kinds,
        num_kv_shared_layers=2,
        sliding_window=8,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=128,
        activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
        intermediate_size=[64] * 6,
    )

    model = read_config(config)

    assert dict(model.kv_sharing) == {
        "model.layers.4.self_attn": "model.layers.2.self_attn",
        "model.layers.5.self_attn": "model.layers.3.self_attn",
    }
    assert [spec.window for spec in model.layers.values()] == [(7, 0), (-1, 0)] * 3
    assert {spec.scale for spec in model.layers.values()} == {1.0}


def test_gemma_4_shares_keys_and_has_larger_heads_where_it_attends_globally(small):
    kinds = ["sliding_attention", "full_attention"] * 2
    config = small(
        "Gemma4Text",
        layer_types=kinds,
        num_kv_shared_layers=2,
        sliding_window=8,
        global_head_dim=32,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=128,
    )

    model = read_config(config)

    assert dict(model.kv_sharing) == {
        "model.layers.2.self_attn": "model.layers.0.self_attn",
        "model.layers.3.self_attn": "model.layers.1.self_attn",
    }
    assert [(spec.head_size, spec.window) for spec in model.layers.values()] == [
        (16, (7, 0)),
        (32, (-1, 0)),
    ] * 2


LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
}
DIMS = MLADims(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)


@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3"])
def test_latent_attention_is_one_kv_head_of_latent_and_rope(name, layers):
    assert layers(name, **LATENT) == [LayerSpec(num_heads=4, num_kv_heads=1, head_size=40, mla=DIMS)] * 4


def test_yarn_multiplies_the_scale_by_mscale_squared(layers):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }
    mscale = 0.1 * math.log(40) + 1

    specs = layers("DeepseekV3", **LATENT, rope_parameters=rope)

    assert [spec.scale for spec in specs] == pytest.approx([24**-0.5 * mscale**2] * 4)


def test_an_indexer_makes_the_layer_sparse(layers):
    specs = layers("DeepseekV32", **LATENT, index_n_heads=2, index_head_dim=8, index_topk=8)

    assert {(spec.sparse, spec.mla) for spec in specs} == {(SparseSpec("token_topk", 8), DIMS)}


def config_fields(name):
    return getattr(pytest.importorskip("transformers"), f"{name}Config").__dataclass_fields__


def test_two_attentions_in_one_layer_are_two_layers(small):
    latent = {k: v for k, v in LATENT.items() if k in config_fields("LongcatFlash")}
    config = small("LongcatFlash", num_layers=2, head_dim=8, **latent)

    assert list(read_config(config).layers) == [
        "model.layers.0.self_attn.0",
        "model.layers.0.self_attn.1",
        "model.layers.1.self_attn.0",
        "model.layers.1.self_attn.1",
    ]


@pytest.mark.parametrize("alibi", [True, False])
def test_falcon_may_use_alibi(alibi, layers):
    assert (
        layers("Falcon", alibi=alibi)
        == [LayerSpec(num_heads=4, num_kv_heads=1, head_size=16, has_alibi=alibi)] * 4
    )


def test_falcon_of_the_new_architecture_groups_its_heads(layers):
    assert layers("Falcon", new_decoder_architecture=True, num_kv_heads=2) == [PLAIN] * 4


def test_mpt_uses_alibi_and_may_set_its_scale(layers):
    specs = layers("Mpt", attn_config={"softmax_scale": 0.5, "clip_qkv": 8.0, "alibi_bias_max": 16})

    assert specs == [LayerSpec(num_heads=4, num_kv_heads=4, head_size=16, scale=0.5, has_alibi=True)] * 4
