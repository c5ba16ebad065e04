"""The rules of BERT, Bloom, Whisper, and DeepSeek's decoders, which cache a latent in place of keys and values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final

from attnplug.core.mla.dims import MLADims
from attnplug.core.sparse import SparseSpec
from attnplug.core.spec import AttentionType
from attnplug.integrations.known.fields import (
    ACTIVATION,
    COMMON,
    DECODER,
    EXPERTS,
    HEADS,
    LAYERS,
    POSITIONS,
    SHARE,
    SIZE,
    SMALL,
    TEXT,
    TOKEN,
    YES_OR_NO,
    Attention,
    Check,
    Family,
    Layers,
    all_of,
    listed,
    number,
    one_of,
    optional,
    real,
    rope_of,
    whole,
)
from attnplug.integrations.model_spec import Client


def _with_equal_heads(heads: int, width: int, **more: Any) -> Attention | None:
    """Attention with a KV head for each head; None where the heads do not divide the width."""
    if width % heads:
        return None
    size = width // heads
    return Attention(num_heads=heads, num_kv_heads=heads, head_size=size, scale=size**-0.5, **more)


def _bert(values: Mapping[str, Any]) -> Layers | None:
    kind = AttentionType.ENCODER_ONLY
    heads, width = values["num_attention_heads"], values["hidden_size"]
    attention = _with_equal_heads(heads, width, attn_type=kind, window=(-1, -1), is_paged=False)
    layers = range(values["num_hidden_layers"])
    if attention is None or attention.head_size == 1:
        return None
    return [(f"encoder.layer.{index}.attention.self", attention) for index in layers]


def _bloom(values: Mapping[str, Any]) -> Layers | None:
    # Each of the three has two names.
    names = ("n_head num_attention_heads", "n_layer num_hidden_layers", "hidden_size n_embed")
    heads, layers, width = ({values[name] for name in each.split() if name in values} for each in names)
    if not len(heads) == len(layers) == len(width) == 1:
        return None
    attention = _with_equal_heads(*heads, *width, has_alibi=True)
    if attention is None:
        return None
    # The model class divides by the root, which may differ from the power -0.5 in the last bit.
    attention = dataclasses.replace(attention, scale=1.0 / attention.head_size**0.5)
    return [(f"h.{index}.self_attention", attention) for index in range(*layers)]


def _whisper(values: Mapping[str, Any]) -> Layers | None:
    def attention(part: str, kind: AttentionType) -> Attention | None:
        return _with_equal_heads(
            values[f"{part}_attention_heads"],
            values["d_model"],
            called_scale=1.0,
            attn_type=kind,
            window=(-1, 0) if kind is AttentionType.DECODER else (-1, -1),
            is_paged=kind is not AttentionType.ENCODER,
        )

    encoder = attention("encoder", AttentionType.ENCODER)
    own = attention("decoder", AttentionType.DECODER)
    cross = attention("decoder", AttentionType.ENCODER_DECODER)
    if encoder is None or own is None or cross is None or 1 in (encoder.head_size, own.head_size):
        return None
    if values.get("num_hidden_layers", values["encoder_layers"]) != values["encoder_layers"]:
        return None
    layers = [(f"encoder.layers.{index}.self_attn", encoder) for index in range(values["encoder_layers"])]
    for index in range(values["decoder_layers"]):
        layers += [
            (f"decoder.layers.{index}.self_attn", own),
            (f"decoder.layers.{index}.encoder_attn", cross),
        ]
    return layers


def _latent(values: Mapping[str, Any]) -> Layers | None:
    heads, nope, rope = (values[n] for n in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
    embedding = rope_of(values, rope, ("default", "yarn"), values.get("partial_rotary_factor"))
    # The configuration class sets both from the other sizes, and a file of another version may differ.
    given = (values.get("head_dim", rope), values.get("qk_head_dim", nope + rope))
    if embedding is None or given != (rope, nope + rope):
        return None
    if values["model_type"] == "deepseek_v2" and values["hidden_size"] % heads:
        return None  # the other configuration classes accept this
    if (values["num_key_value_heads"] or heads) != heads or values.get("index_head_dim", rope) < rope:
        return None
    topk = values.get("index_topk")
    dims = MLADims(
        q_lora_rank=values["q_lora_rank"],
        kv_lora_rank=values["kv_lora_rank"],
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=values["v_head_dim"],
    )
    attention = Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_size=nope + rope,
        head_size_v=dims.v_head_dim,
        scale=_scale(nope + rope, embedding),
        mla=dims,
        sparse=None if topk is None else SparseSpec("token_topk", topk),
    )
    return [(f"layers.{index}.self_attn", attention) for index in range(values["num_hidden_layers"])]


def _scale(size: int, rope: Mapping[str, Any]) -> float:
    """The softmax scale."""
    # YaRN raises it with the length that it adds (https://arxiv.org/abs/2309.00071).
    scale: float = size**-0.5
    share = rope.get("mscale_all_dim", 0)
    if rope["rope_type"] == "default" or not share or rope["factor"] <= 1:
        return scale
    # Without this factor the scale of DeepSeek-V3 is half of the right one.
    raised: float = 0.1 * share * math.log(rope["factor"]) + 1.0
    return scale * raised * raised


_LATENT: Final[dict[str, Check]] = {
    **DECODER,
    **EXPERTS,
    **all_of(YES_OR_NO, "norm_topk_prob seq_aux"),
    **all_of(SIZE, "head_dim kv_lora_rank qk_head_dim"),
    **all_of(HEADS, "n_routed_experts n_shared_experts"),
    **all_of(optional(HEADS), "n_group num_key_value_heads topk_group"),
    **all_of(whole(2, 1 << 12), "qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    **all_of(SMALL, "first_k_dense_replace num_nextn_predict_layers"),
    **all_of(one_of(1), "ep_size moe_layer_freq pretraining_tp"),
    **all_of(TEXT, "scoring_func topk_method"),
    "aux_loss_alpha": number(0, 1e3),
    "q_lora_rank": optional(SIZE),
    "routed_scaling_factor": real(0, 1e6),
}
_SIZES: Final = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_GIVEN: Final = all_of(HEADS, "n_group num_key_value_heads topk_group")
"""Fields that may not be null in newer families."""


def _latent_family(
    name: str,
    kv_heads: int | None,
    fields: Mapping[str, Check],
    defaults: Mapping[str, Any] = _SIZES,
    clients: tuple[Client, ...] = tuple(Client),
) -> Family:
    return Family(
        classes={f"{name}ForCausalLM": "model.", f"{name}Model": ""},
        fields={**_LATENT, **fields},
        defaults={**defaults, "num_key_value_heads": kv_heads},
        read=_latent,
        clients=clients,
    )


OTHERS: Final = {
    "bert": Family(
        classes={"BertForMaskedLM": "bert.", "BertModel": ""},
        fields={
            **COMMON,
            **all_of(one_of(False), "add_cross_attention gradient_checkpointing is_decoder"),
            **all_of(SHARE, "attention_probs_dropout_prob hidden_dropout_prob"),
            **all_of(SIZE, "hidden_size intermediate_size"),
            "classifier_dropout": optional(SHARE),
            "hidden_act": ACTIVATION,
            "layer_norm_eps": real(0, 1),
            "num_attention_heads": HEADS,
            "num_hidden_layers": LAYERS,
            "position_embedding_type": one_of("absolute"),
            "type_vocab_size": whole(1, 1 << 12),
        },
        defaults={},
        read=_bert,
    ),
    "bloom": Family(
        classes={"BloomForCausalLM": "transformer.", "BloomModel": ""},
        fields={
            **COMMON,
            **all_of(YES_OR_NO, "apply_residual_connection_post_layernorm attention_softmax_in_fp32"),
            **all_of(YES_OR_NO, "masked_softmax_fusion skip_bias_add skip_bias_add_qkv"),
            **all_of(SIZE, "hidden_size n_embed seq_length"),
            **all_of(HEADS, "n_head num_attention_heads"),
            **all_of(LAYERS, "n_layer num_hidden_layers"),
            "hidden_dropout": SHARE,
            "layer_norm_epsilon": real(0, 1),
            "n_inner": one_of(None),
            "offset_alibi": whole(0, 1 << 12),
            "pretraining_tp": whole(1, 1 << 12),
            "slow_but_exact": one_of(False),
            "unk_token_id": TOKEN,
        },
        defaults={},
        read=_bloom,
        required=("hidden_size",),
        clients=(Client.ENGINE,),
    ),
    "whisper": Family(
        classes={"WhisperForConditionalGeneration": "model.", "WhisperModel": ""},
        fields={
            **COMMON,
            **all_of(
                SMALL, "mask_feature_length mask_feature_min_masks mask_time_length mask_time_min_masks"
            ),
            **all_of(SHARE, "activation_dropout dropout mask_feature_prob mask_time_prob"),
            **all_of(YES_OR_NO, "apply_spec_augment scale_embedding"),
            **all_of(optional(listed(TOKEN)), "begin_suppress_tokens suppress_tokens"),
            **all_of(SIZE, "classifier_proj_size d_model decoder_ffn_dim encoder_ffn_dim max_length"),
            **all_of(HEADS, "decoder_attention_heads encoder_attention_heads"),
            **all_of(number(0, 0.999), "decoder_layerdrop encoder_layerdrop"),
            **all_of(LAYERS, "decoder_layers encoder_layers num_hidden_layers"),
            **all_of(whole(1, 1 << 12), "median_filter_width num_mel_bins"),
            "activation_function": ACTIVATION,
            "decoder_start_token_id": TOKEN,
            "forced_decoder_ids": optional(listed(listed(optional(TOKEN)))),
            "init_std": real(0, 1),
            "is_encoder_decoder": one_of(True),
            # The full reader tells the encoder from the decoder by its length.
            "max_source_positions": whole(128, 1 << 14),
            "max_target_positions": POSITIONS,
            "use_weighted_layer_sum": one_of(False),
        },
        defaults={"max_source_positions": 1500},
        read=_whisper,
        required=(
            *("d_model", "encoder_layers", "encoder_attention_heads", "decoder_layers"),
            "decoder_attention_heads",
        ),
    ),
    "deepseek_v2": _latent_family(
        "DeepseekV2", None, {"attention_dropout": real(0, 1), "mlp_bias": YES_OR_NO}
    ),
    "deepseek_v3": _latent_family("DeepseekV3", 128, {"rope_interleave": YES_OR_NO}),
    "deepseek_v32": _latent_family(
        "DeepseekV32",
        128,
        {
            **_GIVEN,
            "index_head_dim": whole(2, 1 << 12),
            "index_n_heads": HEADS,
            "index_topk": whole(1, 1 << 16),
            "mlp_bias": YES_OR_NO,
            "q_lora_rank": SIZE,
        },
        {**_SIZES, "index_head_dim": 128, "index_topk": 2048},
        # transformers attends the chosen keys itself, and the full reader says so.
        clients=(Client.ENGINE,),
    ),
    "glm4_moe_lite": _latent_family(
        "Glm4MoeLite",
        20,
        {**_GIVEN, "partial_rotary_factor": one_of(1.0), "rope_interleave": YES_OR_NO},
        {**_SIZES, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256},
    ),
}
"""Model types that are no decoders with rotary embeddings and a cache of keys and values, by name."""
