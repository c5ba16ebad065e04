"""Fields about attention that the model class does not read are named in a note, or refused; none is dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import transformers

from attnplug.errors import ModelConfigError
from attnplug.integrations.model_spec import ModelSpec
from attnplug.integrations.transformers import read_config

SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 128}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Reads a small model of a type with these fields."""

    def call(model_type: str, **fields: Any) -> ModelSpec:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **SMALL, **fields}))
        return read_config(tmp_path)

    return call


@pytest.mark.parametrize(
    ("model_type", "fields", "words"),
    [
        ("llama", {"sliding_window": 16}, "sliding_window=16"),
        ("llama", {"sliding_window": 16, "layer_types": [SLIDING, FULL] * 2}, "sliding_window=16, layer_types"),
        ("llama", {"layer_types": [SLIDING, FULL] * 2}, "layer_types"),
        ("llama", {"alibi": True}, "alibi=True"),
        ("mixtral", {"sliding_window": 16, "layer_types": [FULL] * 4}, "layer_types"),
        ("starcoder2", {"sliding_window": 16, "layer_types": [SLIDING, FULL] * 2}, "layer_types"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("llama", {"attention_multiplier": 0.01}, "attention_multiplier=0.01"),
        ("llama", {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar=64"),
        ("llama", {"key_multiplier": 0.5}, "key_multiplier=0.5"),
        ("llama", {"attention_chunk_size": 8}, "attention_chunk_size=8"),
        ("llama", {"swa_num_attention_heads": 2}, "swa_num_attention_heads=2"),
        ("llama", {"use_attention_sinks": True}, "use_attention_sinks=True"),
        ("llama", {"some_attn_factor": 0.5}, "some_attn_factor=0.5"),
        ("granite", {"layer_types": [SLIDING, FULL] * 2}, "layer_types"),
        ("qwen3", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
        ("gemma", {"sliding_window": 4096, "sliding_window_pattern": 6}, "sliding_window=4096, sliding_window_pattern=6"),
        ("granite", {"alibi": True, "head_dim": 32}, "alibi=True"),
        ("olmo2", {"rotary_dim": 8}, "rotary_dim=8"),
        ("gemma2", {"sliding_window": 8, "sliding_window_size": 4}, "sliding_window_size=4"),
        ("llama", {"sliding_window_size": 16}, "sliding_window_size=16"),
        ("llama", {"use_cla": True, "cla_share_factor": 2}, "use_cla=True, cla_share_factor=2"),
        ("llama", {"use_mla": True}, "use_mla=True"),
        ("llama", {"use_swa": True}, "use_swa=True"),
        ("llama", {"sparse_config": {"topk": 64, "block_size": 64}}, "sparse_config"),
        ("llama", {"moba_topk": 3}, "moba_topk=3"),
        ("llama", {"kv_share_layers": [1, 3]}, "kv_share_layers"),
        ("llama", {"multi_query_group_num": 1}, "multi_query_group_num=1"),
        ("llama", {"use_relative_positions": True}, "use_relative_positions=True"),
        ("llama", {"prefix_lm": True}, "prefix_lm=True"),
        ("llama", {"num_meta_tokens": 128}, "num_meta_tokens=128"),
        ("llama", {"mamba_d_state": 16}, "mamba_d_state=16"),
    ],
)  # fmt: skip
def test_a_field_that_the_class_does_not_read_is_named(
    read: Any, model_type: str, fields: dict[str, Any], words: str
) -> None:
    plain = read(model_type)
    model = read(model_type, **fields)
    (note,) = model.notes
    assert f"does not read {words}" in note
    assert note.startswith(model.name)
    assert not plain.notes
    if model_type == "llama":
        assert model.layers == plain.layers


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"sliding_window": None, "layer_types": [FULL] * 4, "alibi": False, "attn_type_list": [1] * 4}),
        ("llama", {"attention_dropout": 0.1, "attn_implementation": "sdpa", "use_flash_attention_2": True}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 1e4, "a_new_field": 1}),
        ("llama", {"cross_attention_hidden_size": None, "output_attentions": False, "attn_pdrop": 0.5}),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": False, "a_new_field": 1}),
        ("qwen3", {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2, "a_new_field": 1}),
        ("mistral", {"sliding_window": 16, "a_new_field": 1}),
        ("llama", {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 2}),
        ("llama", {"sliding_window": None, "max_window_layers": 28, "attention_softmax_in_fp32": True}),
        ("gemma2", {"head_dim": 16, "attn_logit_softcapping": 20.0, "sliding_window": 8, "a_new_field": 1}),
        ("granite", {"attention_multiplier": 0.25, "a_new_field": 1}),
        ("bloom", {"alibi": True, "num_key_value_heads": None}),
        ("llama", {"use_cla": False, "cla_share_factor": 2, "use_mla": False, "sliding_window_size": -1}),
        ("llama", {"num_query_groups": 2, "prefix_lm": False, "kv_share_layers": []}),
        ("falcon_h1", {"mamba_use_mlp": True, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_ssm": 128, "head_dim": 16}),
    ],
)  # fmt: skip
def test_fields_that_are_read_or_that_ask_for_nothing_are_not_named(
    read: Any, model_type: str, fields: dict[str, Any]
) -> None:
    assert not read(model_type, **fields).notes


def test_a_part_inside_is_named_with_its_place(tmp_path: Path) -> None:
    text = {"model_type": "qwen2", **SMALL, "vocab_size": 512, "alibi": True}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64}
    vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    data = {"model_type": "llava", "text_config": text, "vision_config": vision, "image_token_index": 511}
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert "does not read text_config.alibi=True" in read_config(tmp_path).notes[0]


def test_a_window_that_the_class_knows_and_no_layer_has(read: Any) -> None:
    layers = {"max_window_layers": 4, "use_sliding_window": True, "a_new_field": 1}
    assert "sliding_window=16" in read("qwen3", sliding_window=16, **layers).notes[0]


def test_a_configuration_in_memory(small: Any) -> None:
    assert "sliding_window=8" in read_config(small("Llama", sliding_window=8)).notes[0]
    assert not read_config(small("Gemma2", sliding_window=8)).notes


@pytest.mark.parametrize(
    ("model_type", "field", "kinds", "says"),
    [
        (
            "llama",
            "attn_type_list",
            [0, 1, 0, 1],
            "attn_type_list: 2 of 4 layers are no softmax attention (0)",
        ),
        ("llama", "layer_types", [LINEAR, FULL, LINEAR, LINEAR], "layer_types: 3 of 4 layers"),
        ("qwen3_moe", "layers_block_type", ["mamba", "attention", "mamba", "attention"], "2 of 4 layers"),
        ("mistral", "hybrid_override_pattern", "M*M*", "hybrid_override_pattern: 2 of 4 layers"),
        ("llama", "block_types", ["recurrent", "attention", "recurrent", "attention"], "('recurrent')"),
    ],
)
def test_layers_of_other_kinds_are_refused(
    read: Any, model_type: str, field: str, kinds: Any, says: str
) -> None:
    with pytest.raises(ModelConfigError) as raised:
        read(model_type, **{field: kinds})
    assert says in str(raised.value)
    assert "does not read the field; set model_type to a family that does, or remove it" in str(raised.value)


MINIMAX = {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 8}


@pytest.mark.parametrize("kinds", [[0, 0, 0, 1] * 2, [0] * 7 + [1], [1] + [0] * 7])
def test_the_kinds_of_minimax_text_01_are_read(read: Any, kinds: list[int]) -> None:
    model = read("minimax", **MINIMAX, attn_type_list=kinds, rotary_dim=8)
    assert [spec.state is None for spec in model.layers.values()] == [bool(kind) for kind in kinds]
    assert not model.other_layers
    assert model.notes[0] == f"attn_type_list is read as layer_types: {sum(kinds)} of 8 layers attend."
    assert "rotary_dim=8" in model.notes[1]


def test_the_kinds_of_minimax_text_01_fit_the_rest(read: Any) -> None:
    with pytest.raises(ModelConfigError, match="attn_type_list has 3 layers, and num_hidden_layers=8"):
        read("minimax", **MINIMAX, attn_type_list=[0, 1, 0])
    with pytest.raises(ModelConfigError, match="attn_type_list and layer_types name other kinds"):
        read("minimax", **MINIMAX, attn_type_list=[0, 1] * 4, layer_types=[FULL] * 8)


def test_reading_the_kinds_changes_no_configuration() -> None:
    sizes = {**SMALL, **MINIMAX, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.MiniMaxConfig(**sizes, attn_type_list=[0] * 7 + [1])
    assert sum(spec.state is None for spec in read_config(config).layers.values()) == 1
    assert config.attn_type_list == [0] * 7 + [1]
    assert config.layer_types == [FULL, LINEAR] * 4


LONGCAT = {
    "num_layers": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
}
LONGCAT |= {"moe_topk": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32, "num_key_value_heads": 4}
MIMO = {"num_hidden_layers": 6, "head_dim": 24, "v_head_dim": 16, "sliding_window": 8, "n_routed_experts": 4}
MIMO |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
MIMO |= {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 24, "swa_v_head_dim": 16}
MIMO |= {"swa_rope_theta": 10000, "sliding_window_size": 8}
WINDOWS = [0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("model_type", "fields", "words"),
    [
        ("mistral", {"sliding_window": 16, "use_sliding_window": False}, "use_sliding_window=False"),
        ("phi3", {"sliding_window": 16, "use_sliding_window": False, "pad_token_id": 0}, "use_sliding_window=False"),
        ("gemma2", {"sliding_window": 16, "use_sliding_window": False}, "use_sliding_window=False"),
        ("gemma2", {"sliding_window": 16, "sliding_window_size": 0}, "sliding_window_size=0"),
        ("gemma2", {"use_attn_soft_cap": False}, "use_attn_soft_cap=False"),
        ("bloom", {"alibi": False, "num_key_value_heads": None}, "alibi=False"),
        ("longcat_flash", {**LONGCAT, "mla_scale_q_lora": False}, "mla_scale_q_lora=False"),
        ("longcat_flash", {**LONGCAT, "mla_scale_kv_lora": False}, "mla_scale_kv_lora=False"),
        ("apertus", {"qk_norm": False, "pad_token_id": 0}, "qk_norm=False"),
        ("starcoder2", {"scale_attn_weights": False}, "scale_attn_weights=False"),
        ("llama", {"bidirectional": True}, "bidirectional=True"),
        ("llama", {"causal": False}, "causal=False"),
        ("qwen3", {"causal_attention": False}, "causal_attention=False"),
        ("mistral", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("llama", {"attention_method": "MLA"}, "attention_method='MLA'"),
        ("stablelm", {"rotary_scaling_factor": 2.0}, "rotary_scaling_factor=2.0"),
        ("mimo_v2_flash", {**MIMO, "hybrid_layer_pattern": [1] * 6}, "hybrid_layer_pattern"),
        ("mimo_v2_flash", {**MIMO, "hybrid_layer_pattern": [0, 1] * 3}, "hybrid_layer_pattern"),
        ("mimo_v2_flash", {**MIMO, "swa_num_key_value_heads": 2}, "swa_num_key_value_heads=2"),
        ("mimo_v2_flash", {**MIMO, "swa_head_dim": 16}, "swa_head_dim=16"),
        ("llama", {"block_types": [0, 1, 0, 1]}, "block_types"),
    ],
)  # fmt: skip
def test_a_field_that_the_layers_contradict_is_named(
    read: Any, model_type: str, fields: dict[str, Any], words: str
) -> None:
    (note,) = read(model_type, **fields).notes
    assert f"does not read {words}: the layers are those of the class without it" in note


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"causal": True, "bidirectional": False, "use_qk_norm": False, "alibi": False}),
        ("llama", {"is_causal": False}),
        ("llama", {"sliding_window_size": 0, "use_attn_soft_cap": False, "mla_scale_q_lora": False}),
        ("gptj", {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8, "scale_attn_weights": True, "num_key_value_heads": None}),
        ("starcoder2", {"scale_attn_weights": True}),
        ("apertus", {"qk_norm": True, "pad_token_id": 0}),
        ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2, "use_qk_norm": True}),
        ("longcat_flash", {**LONGCAT, "attention_method": "MLA", "mla_scale_q_lora": True, "mla_scale_kv_lora": True}),
        ("stablelm", {"rotary_scaling_factor": 1.0}),
        ("mistral", {"sliding_window": 16, "use_sliding_window": True}),
        ("mimo_v2_flash", {**MIMO, "hybrid_layer_pattern": WINDOWS}),
    ],
)  # fmt: skip
def test_a_field_that_the_layers_already_follow_is_not_named(
    read: Any, model_type: str, fields: dict[str, Any]
) -> None:
    assert not read(model_type, **fields).notes


def test_a_pattern_of_windows_follows_the_layers_of_every_rank(read: Any, tmp_path: Path) -> None:
    fields = {**MIMO, "hybrid_layer_pattern": WINDOWS}
    read("mimo_v2_flash", **fields)
    model = read_config(tmp_path, tensor_parallel_size=2)
    assert not model.notes
    assert [spec.window[0] >= 0 for spec in model.layers.values()] == [kind == 1 for kind in WINDOWS]


@pytest.mark.parametrize("heads", [{}, {"new_decoder_architecture": True, "num_kv_heads": 2}])
def test_falcon_says_that_it_multiplies_its_slopes(small: Any, heads: dict[str, Any]) -> None:
    (note,) = read_config(small("Falcon", alibi=True, **heads)).notes
    assert "multiplies ALiBi's slopes by the scale of its layers" in note
    assert "times 0.25." in note
    assert not read_config(small("Falcon", alibi=False, **heads)).notes


def test_slopes_of_mpt_are_those_of_the_default(small: Any) -> None:
    assert not read_config(small("Mpt", attn_config={"alibi_bias_max": 8})).notes
    for most in (4, 16):
        (note,) = read_config(small("Mpt", attn_config={"alibi_bias_max": most})).notes
        assert (
            f"does not read attn_config.alibi_bias_max={most}: transformers' MPT makes the slopes of 8"
            in note
        )
