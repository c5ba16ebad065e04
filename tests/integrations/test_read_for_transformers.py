"""`client="transformers"`: the layers as transformers asks for them when attnplug serves the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from attnplug.errors import ModelConfigError
from attnplug.integrations.transformers import attention_decisions, read_config, register

MODELS = Path(__file__).parents[2] / "examples" / "models"
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "dtype": "float32",
}
CONFIGS = {
    "gemma2": {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 4},
    "llama4_text": {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2},
    "gpt_oss": {
        **SMALL,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 4,
        "sliding_window": 4,
    },
    "deepseek_v3": {
        **SMALL,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 2,
        "intermediate_size": 64,
    },
    "bert": {**SMALL, "intermediate_size": 64},
    "whisper": {
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "vocab_size": 64,
        "num_mel_bins": 8,
        "max_source_positions": 20,
        "max_target_positions": 16,
        "decoder_start_token_id": 1,
        "pad_token_id": 0,
        "dtype": "float32",
    },
}


@pytest.mark.parametrize("family", CONFIGS)
def test_the_layers_are_those_that_a_run_asks_for(family: str) -> None:
    register()
    config = transformers.CONFIG_MAPPING[family](**CONFIGS[family])
    build = transformers.AutoModelForCausalLM
    if family in ("bert", "whisper"):
        build = transformers.AutoModel
    model = build.from_config(config, attn_implementation="attnplug").eval()
    inputs = {"input_ids": torch.randint(2, 64, (1, 7))}
    if family == "whisper":
        inputs = {"input_features": torch.randn(1, 8, 40), "decoder_input_ids": inputs["input_ids"]}
    with torch.no_grad():
        model(**inputs)
    asked = {name: decision.spec for name, decision in attention_decisions(model).items()}
    read = read_config(config, client="transformers")
    assert asked
    for name, spec in asked.items():
        (own,) = [each for path, each in read.layers.items() if path.endswith(name)]
        assert own == spec
    assert len(read.layers) == len(asked)
    assert all(spec.direct_kv for spec in read.layers.values())
    assert not read.kv_sharing


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    with pytest.raises(
        ModelConfigError, match=r"BloomAttention computes attention of its own and would never call"
    ):
        read_config(MODELS / "bloom-7b1.json", client="transformers")


def test_a_layer_of_chosen_keys_is_refused() -> None:
    config = transformers.CONFIG_MAPPING["deepseek_v32"]()
    with pytest.raises(ModelConfigError, match="sparse attention is not served through transformers"):
        read_config(config, client="transformers")


def test_an_unknown_client_is_refused_with_the_list() -> None:
    with pytest.raises(ModelConfigError, match=r"client='vllm': must be one of engine, transformers"):
        read_config(MODELS / "qwen3-8b.json", client="vllm")


def test_a_storage_dtype_is_no_choice_of_transformers() -> None:
    with pytest.raises(ModelConfigError, match=r"kv_cache_dtype='fp8': transformers keeps keys and values"):
        read_config(MODELS / "qwen3-8b.json", kv_cache_dtype="fp8", client="transformers")
