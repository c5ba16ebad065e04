"""Configurations of each model type with a rule: a small one, and values of every field that the rule knows."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from attnplug.integrations.known.reading import FAMILIES

_LLAMA = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 256, "intermediate_size": 64}
_LLAMA |= {"vocab_size": 512, "num_key_value_heads": 4, "pad_token_id": None}
_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
_LATENT |= {"v_head_dim": 24, "num_key_value_heads": 8, "n_routed_experts": 8, "moe_intermediate_size": 16}
_LATENT |= {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "num_hidden_layers": 3}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}

SMALL: dict[str, dict[str, Any]] = {name: dict(_LLAMA) for name in FAMILIES}
for _name in ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"):
    SMALL[_name] |= _LATENT
SMALL["deepseek_v32"] |= {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 16}
SMALL["granite"] |= {"attention_multiplier": 0.125}
SMALL["mixtral"] |= {"num_local_experts": 4}
SMALL["gpt_oss"] |= {"num_local_experts": 4}
SMALL["llama4_text"] |= {"num_local_experts": 2, "intermediate_size_mlp": 64}
for _name in ("qwen2_moe", "qwen3_moe"):
    SMALL[_name] |= {name: value for name, value in _EXPERTS.items() if name in FAMILIES[_name].fields}
    del SMALL[_name]["num_local_experts"]
SMALL["qwen2_moe"] |= {"shared_expert_intermediate_size": 16}
SMALL["bert"] = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 512}
SMALL["bert"] |= {"intermediate_size": 64}
SMALL["bloom"] = {"n_layer": 2, "n_head": 4, "hidden_size": 64, "vocab_size": 512}
SMALL["whisper"] = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "decoder_layers": 2}
SMALL["whisper"] |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
SMALL["whisper"] |= {"vocab_size": 512, "pad_token_id": 3, "num_mel_bins": 8}

_YES_OR_NO = [True, False]
_YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32}
_YARN |= {"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 8192}
_LINEAR = {"type": "linear", "factor": 8.0}
_LONG = {"short_factor": [1.0] * 16, "long_factor": [2.5] * 16}
_ROPES: list[Any] = [
    None,
    _LINEAR,
    _LLAMA3,
    _YARN,
    {"type": "yarn", "factor": 4},
    {"rope_type": "yarn", "factor": 1},
]
_ROPES += [
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 5e5},
]
_ROPES += [
    {"rope_type": "longrope", **_LONG},
    {"type": "su", **_LONG},
    {"rope_type": "longrope", **_LONG, "long_factor": [1.0]},
]
_ROPES += [
    {"rope_type": "llama3", "factor": 8.0},
    {"rope_type": "unheard"},
    {"type": "linear", "rope_type": "yarn", "factor": 2},
]
_ROPES += [{**_YARN, "mscale_all_dim": 0}, {**_YARN, "attention_factor": 1.5}, {"factor": 2.0}, {}, 3, [1]]
_NESTED = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default"},
}
_ROPES += [_NESTED, {**_NESTED, "full_attention": _LINEAR}, {"full_attention": _LINEAR}]
_ROPES += [
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "default", "partial_rotary_factor": 1.0},
]

_FP8 = {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [128, 128]}
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
VALUES: dict[str, list[Any]] = {
    "_name_or_path": ["", "somewhere/model"],
    "_sliding_window_pattern": [6, 2],
    "add_cross_attention": _YES_OR_NO,
    "attention_bias": _YES_OR_NO,
    "attention_chunk_size": [2, 100, 8192, None],
    "attention_dropout": [0.0, 0, 0.5, 1, 2],
    "attention_multiplier": [0.125, 1, 1.0, 0.0078125, 2],
    "auto_map": [{"AutoConfig": "configuration_deepseek.DeepseekV3Config"}],
    "attn_logit_softcapping": [None, 50.0, 0.5, 50, 0.0],
    "attn_temperature_tuning": _YES_OR_NO,
    "begin_suppress_tokens": [None, [], [220, 256]],
    "bos_token_id": [None, 1, 100000],
    "forced_decoder_ids": [None, [[1, 50], [2, None]]],
    "order_of_interleaved_layers": ["local_attn_first", "global_attn_first"],
    "quantization_config": [_FP8, {"quant_method": "mxfp4"}, {"quant_method": "unheard"}, {}, None],
    "cache_implementation": ["hybrid", "static"],
    "chunk_size_feed_forward": [0, 8],
    "decoder_attention_heads": [1, 2, 4, 8, 3, 64],
    "decoder_layerdrop": [0, 0.0, 0.5],
    "decoder_layers": [1, 3],
    "dtype": ["float16", "bfloat16", "float32", None, "float64", "auto"],
    "encoder_attention_heads": [1, 2, 4, 3],
    "encoder_layerdrop": [0, 0.0, 0.5],
    "encoder_layers": [1, 3],
    "eos_token_id": [None, 2, [2, 3], 100000],
    "first_k_dense_replace": [0, 1, 3],
    "gradient_checkpointing": _YES_OR_NO,
    "head_dim": [None, 2, 16, 24, 32, 64, 128, 256, 7, 80],
    "hidden_act": ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "unheard"],
    "hidden_size": [64, 256, 512, 320, 250],
    "index_head_dim": [8, 16, 128, 4],
    "index_topk": [1, 16, 64, 2048],
    "initializer_range": [0.02, 1, 0.0],
    "interleave_moe_layer_step": [1, 2],
    "is_decoder": _YES_OR_NO,
    "is_encoder_decoder": _YES_OR_NO,
    "kv_lora_rank": [16, 512],
    "layer_types": [
        None,
        [_FULL] * 4,
        [_SLIDING] * 4,
        [_SLIDING, _FULL] * 2,
        [_FULL, _FULL, _FULL, _SLIDING],
        [_FULL] * 3,
        [_CHUNKED] * 4,
        [_CHUNKED, _FULL] * 2,
        ["linear_attention"] * 4,
    ],
    "max_position_embeddings": [64, 512, 4096, 131072, 40, 8],
    "max_source_positions": [128, 1500, 61, 40],
    "max_target_positions": [64, 448, 40],
    "max_window_layers": [0, 1, 2, 4, 28],
    "mlp_only_layers": [[], [0, 1], None],
    "model_type": [],
    "moe_layers": [None, [], [0, 1]],
    "n_embed": [64, 32],
    "n_head": [1, 4, 16, 3],
    "n_layer": [1, 3],
    "no_rope_layer_interval": [1, 2, 4],
    "no_rope_layers": [None, [], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1]],
    "num_attention_heads": [1, 2, 4, 8, 16, 6],
    "num_hidden_layers": [1, 4, 7],
    "num_key_value_heads": [None, 1, 2, 4, 8, 3, 16],
    "offset_alibi": [100],
    "original_max_position_embeddings": [64, 4096],
    "output_attentions": _YES_OR_NO,
    "output_hidden_states": _YES_OR_NO,
    "pad_token_id": [None, 0, 511, 512, 100000],
    "partial_rotary_factor": [0.25, 0.5, 0.75, 1.0, 0.3, 1],
    "position_embedding_type": ["rope_gptj", "absolute", "relative_key"],
    "pretraining_tp": [1, 2],
    "q_lora_rank": [None, 16, 1536],
    "qk_head_dim": [24, 192],
    "qk_nope_head_dim": [2, 16, 128],
    "qk_rope_head_dim": [2, 8, 64, 7],
    "query_pre_attn_scalar": [16, 144, 256, 1],
    "return_dict": _YES_OR_NO,
    "rms_norm_eps": [1e-6, 1, 0.0],
    "rope_interleave": _YES_OR_NO,
    "rope_local_base_freq": [10000.0, 10000],
    "rope_parameters": _ROPES,
    "rope_scaling": _ROPES,
    "rope_theta": [10000.0, 1000000, 5e5, None, -1, "10000"],
    "scoring_func": ["sigmoid", "softmax"],
    "sliding_window": [None, 1, 2, 60, 100, 4096, 1 << 20, 0, -1],
    "sliding_window_pattern": [1, 2, 6],
    "slow_but_exact": _YES_OR_NO,
    "topk_method": ["greedy", "noaux_tc", "group_limited_greedy"],
    "torch_dtype": ["float16", "bfloat16", "float32", None],
    "use_bidirectional_attention": [None, False, True],
    "use_sliding_window": _YES_OR_NO,
    "use_weighted_layer_sum": _YES_OR_NO,
    "v_head_dim": [2, 24, 128],
    "vocab_size": [512, 1000],
}
"""Values of fields: ones that a rule understands, and ones that it must not."""

PLAIN: list[Any] = [
    True,
    False,
    None,
    0,
    1,
    2,
    3,
    8,
    64,
    0.0,
    0.1,
    0.5,
    1.0,
    30.0,
    "silu",
    "gelu",
    "text",
    [],
    [1],
]
"""Values of all other fields: those are taken that the rule understands."""


def values_of(model_type: str, field: str) -> list[Any]:
    """Values of a field of `model_type` to try; at least one is understood by its rule."""
    check = FAMILIES[model_type].fields[field]
    return VALUES.get(field, [value for value in PLAIN if check(value)])


@st.composite
def configurations(draw: st.DrawFn, model_type: str, most: int = 5) -> dict[str, Any]:
    """A small configuration of `model_type` with some fields changed, added or left out."""
    family = FAMILIES[model_type]
    names = st.sampled_from(sorted(set(family.fields) - {"model_type", "architectures"}))
    data = {"model_type": model_type, **SMALL[model_type]}
    for name in draw(st.lists(names, max_size=most, unique=True)):
        data[name] = draw(st.sampled_from(values_of(model_type, name)))
    if draw(st.booleans()):
        data["architectures"] = [draw(st.sampled_from(sorted(family.classes)))]
    absent = sorted({"num_key_value_heads", "head_dim", "sliding_window", "kv_lora_rank"} & set(data))
    for name in draw(st.sampled_from([[], [], *([name] for name in absent)])):
        del data[name]
    return data
