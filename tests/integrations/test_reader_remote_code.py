"""Configurations that name code of their own are read as the family that their names say, with a note."""

from __future__ import annotations

import json

import pytest

from attnplug.core.mla.dims import MLADims
from attnplug.core.spec import LayerSpec
from attnplug.errors import ModelConfigError
from attnplug.integrations.transformers import read_config

LLAMA = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "vocab_size": 64}
KIMI_K2 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 163840,
}
LATENT = LayerSpec(
    num_heads=64,
    num_kv_heads=1,
    head_size=576,
    scale=192**-0.5 * 1.3465735902799727**2,
    mla=MLADims(
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    ),
)


@pytest.fixture
def read(tmp_path):
    """Reads a configuration from a file."""

    def read_data(data):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(data))
        return read_config(path)

    return read_data


def test_kimi_k2_is_deepseek_v3_by_its_architectures(read):
    model = read({**KIMI_K2, "model_type": "kimi_k9"})

    assert set(model.layers.values()) == {LATENT}
    assert len(model.layers) == 61
    assert (model.name, model.model_type) == ("DeepseekV3ForCausalLM", "deepseek_v3")
    (note,) = model.notes
    assert note.startswith("model_type 'kimi_k9' is unknown to transformers")
    assert "read as 'deepseek_v3', the family of DeepseekV3ForCausalLM in its architectures" in note


def test_kimi_k25_names_a_class_of_remote_code_though_its_type_is_known(read):
    model = read(
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "dtype": "bfloat16",
            "text_config": {**KIMI_K2, "dtype": "bfloat16"},
            "vision_config": {"_attn_implementation": "flash_attention_2"},
        }
    )

    texts = [spec for path, spec in model.layers.items() if "language_model" in path]
    assert texts == [LATENT] * 61
    assert len(model.layers) == 61 + 27
    assert model.name == "Kimi_K25ForConditionalGeneration"
    assert any("architectures names KimiK25ForConditionalGeneration" in note for note in model.notes)


@pytest.mark.parametrize(
    ("model_type", "architecture", "name"),
    [
        ("phimoe", "PhiMoEForCausalLM", "PhimoeForCausalLM"),
        ("llama", "LlamaWithTricks", "LlamaForCausalLM"),
        ("qwen3", "OurOwnForCausalLM", "Qwen3ForCausalLM"),
    ],
)
def test_a_class_that_transformers_lacks_falls_back_to_that_of_the_family(
    model_type, architecture, name, read
):
    model = read({**LLAMA, "model_type": model_type, "architectures": [architecture]})

    assert model.name == name
    assert len(model.layers) == 2
    (note,) = model.notes
    assert note.startswith(f"architectures names {architecture}, which transformers")
    assert f"its {name}, of the family {model_type!r}, was read" in note


@pytest.mark.parametrize(
    ("architecture", "family"),
    [("LlamaForCausalLM", "llama"), ("MistralForCausalLM", "mistral"), ("Qwen2ForCausalLM", "qwen2")],
)
def test_a_type_that_transformers_lacks_falls_back_to_the_family_of_the_class(architecture, family, read):
    known = read({**LLAMA, "model_type": family, "architectures": [architecture]})
    model = read({**LLAMA, "model_type": "something_new", "architectures": [architecture]})

    assert model.layers == known.layers
    assert model.model_type == family
    assert not known.notes
    assert len(model.notes) == 1


def test_a_type_inside_another_configuration_falls_back_too(read):
    text = {**LLAMA, "model_type": "something_new", "architectures": ["LlamaForCausalLM"]}
    model = read(
        {"model_type": "llava", "text_config": text, "architectures": ["LlavaForConditionalGeneration"]}
    )

    assert len([path for path in model.layers if "language_model" in path]) == 2
    assert model.notes[0].startswith("text_config.model_type 'something_new' is unknown")


def test_without_a_known_name_the_refusal_says_what_to_do(read):
    with pytest.raises(ModelConfigError) as caught:
        read({**LLAMA, "model_type": "something_new", "architectures": ["SomethingForCausalLM"]})

    assert "set model_type to that family" in str(caught.value)
    assert "LayerSpecs of your own" in str(caught.value)


def test_longcat_has_two_layers_of_attention_in_each_of_its_layers(read):
    model = read(
        {
            "model_type": "longcat_flash",
            "architectures": ["LongcatFlashForCausalLM"],
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_layers": 3,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 16,
            "kv_lora_rank": 64,
            "q_lora_rank": 64,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "vocab_size": 64,
        }
    )

    assert len(model.layers) == 6
    (spec,) = set(model.layers.values())
    assert (spec.head_size, spec.mla.kv_lora_rank, spec.scale) == (72, 64, 24**-0.5)


def test_llama_with_vision_has_cross_attention_that_keeps_a_cache(read):
    model = read(
        {
            "model_type": "mllama",
            "architectures": ["MllamaForConditionalGeneration"],
            "text_config": {
                **LLAMA,
                "model_type": "mllama_text_model",
                "num_hidden_layers": 4,
                "cross_attention_layers": [1, 3],
                "pad_token_id": 0,
            },
            "vision_config": {
                "model_type": "mllama_vision_model",
                "hidden_size": 32,
                "intermediate_size": 32,
                "attention_heads": 2,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "image_size": 28,
                "patch_size": 14,
                "intermediate_layers_indices": [0, 1],
                "vision_output_dim": 96,
            },
        }
    )

    kinds = [(spec.attn_type, spec.direct_kv) for spec in model.layers.values()]
    assert kinds == [("decoder", False), ("encoder_decoder", False)] * 2
    assert {(spec.num_heads, spec.num_kv_heads, spec.head_size) for spec in model.layers.values()} == {
        (4, 2, 16)
    }
    assert "alters the mask or adds a bias of its own" in model.unread["model.vision_model"]


@pytest.mark.parametrize(
    ("model_type", "architecture", "fields", "windows", "cls"),
    [
        # transformers itself reads a Mistral with layer_types as Ministral.
        (
            *("mistral", "MistralForCausalLM"),
            {"layer_types": ["full_attention", "sliding_attention"]},
            *([-1, 7], "MinistralForCausalLM"),
        ),
        (
            *("qwen2", "MistralForCausalLM"),
            {"use_sliding_window": True, "max_window_layers": 1},
            *([-1, 7], "Qwen2ForCausalLM"),
        ),
        ("mistral", "LlamaForCausalLM", {}, [7, 7], "MistralForCausalLM"),
    ],
)
def test_a_class_of_another_family_gives_way_to_that_of_the_configuration(
    read, model_type, architecture, fields, windows, cls
):
    config = {**LLAMA, "num_hidden_layers": 2, "head_dim": 16, "sliding_window": 8, **fields}
    model = read({**config, "model_type": model_type, "architectures": [architecture]})
    assert [spec.window[0] for spec in model.layers.values()] == windows
    assert model.notes[0].startswith(f"architectures names {architecture}, which does not take")
    assert model.notes[0].endswith(f"its {cls} was read")
