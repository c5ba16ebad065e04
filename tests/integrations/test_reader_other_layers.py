"""Hybrid and multimodal models: attention is read, and everything else is named."""

from __future__ import annotations

from attnplug.core.spec import LayerSpec
from attnplug.integrations.transformers import read_config


def kinds_of(model):
    """By layer, its first kind."""
    return {name: spec.kinds[0] for name, spec in model.layers.items()}


def test_jamba_has_a_convolution_and_a_state_in_each_mamba_layer(small):
    model = read_config(small("Jamba", attn_layer_period=2, attn_layer_offset=1, num_experts=2))

    assert kinds_of(model) == {
        "model.layers.0.mamba.conv1d": "conv",
        "model.layers.0.mamba": "state",
        "model.layers.1.self_attn": "full",
        "model.layers.2.mamba.conv1d": "conv",
        "model.layers.2.mamba": "state",
        "model.layers.3.self_attn": "full",
    }
    assert not model.other_layers


def test_bamba_has_states(small):
    config = small("Bamba", attn_layer_indices=[2], mamba_n_heads=8, mamba_d_head=16)

    model = read_config(config)

    assert list(kinds_of(model).values()) == ["conv", "state"] * 2 + ["full"] + ["conv", "state"]
    assert not model.other_layers


def test_falcon_h1_has_attention_and_mamba_in_each_layer(small):
    model = read_config(small("FalconH1", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16))

    assert list(kinds_of(model).values()) == ["conv", "state", "full"] * 4
    assert list(model.layers)[:3] == [
        f"model.layers.0.{part}" for part in ("mamba.conv1d", "mamba", "self_attn")
    ]


def test_qwen_3_next_has_gated_delta_nets(small):
    config = small(
        "Qwen3Next", linear_num_value_heads=4, linear_num_key_heads=2, num_experts=2, num_experts_per_tok=1
    )

    model = read_config(config)

    assert list(kinds_of(model).values()) == ["conv", "state"] * 3 + ["full"]
    spec = model.layers["model.layers.0.linear_attn"]
    assert (spec.num_heads, spec.num_kv_heads) == (4, 2)


def test_lfm_2_has_convolutions(small):
    model = read_config(small("Lfm2", layer_types=["conv", "full_attention"] * 2))

    assert list(kinds_of(model).values()) == ["conv", "full"] * 2
    assert not model.other_layers


def test_transformers_computes_its_states_itself(small):
    config = small("Lfm2", layer_types=["conv", "full_attention"] * 2)

    model = read_config(config, client="transformers")

    assert list(kinds_of(model).values()) == ["full"] * 2
    assert dict(model.other_layers) == {"model.layers.0.conv": "conv", "model.layers.2.conv": "conv"}


def test_nemotron_h_names_layers_of_every_kind(small):
    kinds = ["mamba", "moe", "attention", "mlp"]
    config = small("NemotronH", layers_block_type=kinds, mamba_num_heads=8, mamba_head_dim=16)

    model = read_config(config)

    assert list(model.other_layers.values()) == ["moe", "mlp"]
    assert list(kinds_of(model).values()) == ["conv", "state", "full"]


def test_a_model_of_mamba_alone_has_states_and_no_attention(small):
    model = read_config(small("Mamba"))

    assert list(kinds_of(model).values()) == ["conv", "state"] * 4
    assert not model.other_layers


def test_an_unknown_recurrence_is_named(small):
    model = read_config(small("Rwkv"))

    assert not model.layers
    assert set(model.other_layers.values()) == {"rwkv"}


def test_one_attention_shared_by_several_layers_is_read_at_each(small):
    kinds = ["mamba", "hybrid"] * 2
    config = small("Zamba2", layers_block_type=kinds, num_mem_blocks=1, head_dim=32)

    model = read_config(config)

    attention = [name for name, kind in kinds_of(model).items() if kind == "full"]
    assert attention == [f"model.layers.{i}.shared_transformer.self_attn" for i in (1, 3)]
    assert list(kinds_of(model).values()).count("state") == 4
    assert not model.other_layers


def test_convolutions_inside_attention_are_named_beside_it(small):
    config = small("Zaya", num_hidden_layers=2, num_experts=2, layer_types=["hybrid"] * 2)

    model = read_config(config)

    assert len(model.layers) == 2
    assert set(model.other_layers.values()) == {"conv"}


def split(model, prefix):
    """The specs of the layers whose names start with `prefix`, and those of the others."""
    inside = [spec for name, spec in model.layers.items() if name.startswith(prefix)]
    return inside, [spec for name, spec in model.layers.items() if not name.startswith(prefix)]


def tiny_vision(**more):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return {**sizes, "image_size": 28, "patch_size": 14, **more}


TOWER = LayerSpec(num_heads=2, num_kv_heads=2, head_size=16, attn_type="encoder_only", direct_kv=True)


def test_gemma_3_with_images_reads_the_text_and_the_tower(small):
    text = small("Gemma3Text", sliding_window=8).to_dict()
    config = small("Gemma3", text_config=text, vision_config=tiny_vision(), mm_tokens_per_image=4)

    model = read_config(config)

    assert next(iter(model.layers)) == "model.language_model.layers.0.self_attn"
    towers, texts = split(model, "model.vision_tower.")
    assert {spec.mm_prefix for spec in texts} == {True}
    # SigLIP's pooling head is a torch.nn.MultiheadAttention: one query reads all patches.
    assert towers == [TOWER, TOWER.replace(attn_type="encoder_decoder")]
    assert not model.other_layers


def test_a_model_whose_images_stay_causal_asks_for_no_spans(small):
    config = small(
        "Llava",
        text_config=small("Llama").to_dict(),
        vision_config=tiny_vision(model_type="clip_vision_model"),
    )

    model = read_config(config)

    towers, texts = split(model, "model.vision_tower.")
    assert {spec.mm_prefix for spec in texts} == {False}
    assert towers == [TOWER]
    assert not model.other_layers


def test_prefixes_of_text_that_see_each_other_are_asked_for(small):
    specs = [set(read_config(small("HrmText", prefix_lm=prefix)).layers.values()) for prefix in (True, False)]

    assert [{spec.mm_prefix for spec in found} for found in specs] == [{True}, {False}]
