"""The rules of BERT, Bloom and Whisper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from attnplug.core.spec import AttentionType
from attnplug.integrations.known.fields import (
    ACTIVATION,
    COMMON,
    HEADS,
    LAYERS,
    POSITIONS,
    SHARE,
    SIZE,
    SMALL,
    TOKEN,
    YES_OR_NO,
    Attention,
    Family,
    Layers,
    listed,
    number,
    one_of,
    optional,
    real,
    whole,
)
from attnplug.integrations.model_spec import Client


def _bert(values: Mapping[str, Any]) -> Layers | None:
    heads = values["num_attention_heads"]
    if values["hidden_size"] % heads:
        return None
    size = values["hidden_size"] // heads
    attention = Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_size=size,
        scale=size**-0.5,
        attn_type=AttentionType.ENCODER_ONLY,
        window=(-1, -1),
        is_paged=False,
    )
    layers = range(values["num_hidden_layers"])
    return None if size == 1 else [(f"encoder.layer.{index}.attention.self", attention) for index in layers]


def _bloom(values: Mapping[str, Any]) -> Layers | None:
    # Each of the three has two names.
    heads, layers, width = (
        {values[name] for name in names if name in values}
        for names in (
            ("n_head", "num_attention_heads"),
            ("n_layer", "num_hidden_layers"),
            ("hidden_size", "n_embed"),
        )
    )
    if not len(heads) == len(layers) == len(width) == 1:
        return None
    return _bloom_layers(heads.pop(), layers.pop(), width.pop())


def _bloom_layers(heads: int, layers: int, width: int) -> Layers | None:
    if width % heads:
        return None
    size = width // heads
    # The model class divides by the root, which may differ from the power -0.5 in the last bit.
    attention = Attention(
        num_heads=heads, num_kv_heads=heads, head_size=size, scale=1.0 / size**0.5, has_alibi=True
    )
    return [(f"h.{index}.self_attention", attention) for index in range(layers)]


def _whisper(values: Mapping[str, Any]) -> Layers | None:
    width, layers = values["d_model"], values["encoder_layers"]
    heads = {part: values[f"{part}_attention_heads"] for part in ("encoder", "decoder")}
    if any(width % count or width == count for count in heads.values()):
        return None
    if values.get("num_hidden_layers", layers) != layers:
        return None
    return list(_whisper_layers(values, heads))


def _whisper_layers(values: Mapping[str, Any], heads: Mapping[str, int]) -> Iterator[tuple[str, Attention]]:
    def attention(part: str, kind: AttentionType) -> Attention:
        size = values["d_model"] // heads[part]
        return Attention(
            num_heads=heads[part],
            num_kv_heads=heads[part],
            head_size=size,
            scale=size**-0.5,
            called_scale=1.0,
            attn_type=kind,
            window=(-1, 0) if kind is AttentionType.DECODER else (-1, -1),
            is_paged=kind is not AttentionType.ENCODER,
        )

    encoder = attention("encoder", AttentionType.ENCODER)
    for index in range(values["encoder_layers"]):
        yield f"encoder.layers.{index}.self_attn", encoder
    own = attention("decoder", AttentionType.DECODER)
    cross = attention("decoder", AttentionType.ENCODER_DECODER)
    for index in range(values["decoder_layers"]):
        yield f"decoder.layers.{index}.self_attn", own
        yield f"decoder.layers.{index}.encoder_attn", cross


_MASKING: Final = {
    "mask_feature_length": SMALL,
    "mask_feature_min_masks": SMALL,
    "mask_feature_prob": SHARE,
    "mask_time_length": SMALL,
    "mask_time_min_masks": SMALL,
    "mask_time_prob": SHARE,
}
"""Fields of Whisper about training."""

OTHERS: Final = {
    "bert": Family(
        classes={"BertForMaskedLM": "bert.", "BertModel": ""},
        fields={
            **COMMON,
            "add_cross_attention": one_of(False),
            "attention_probs_dropout_prob": SHARE,
            "classifier_dropout": optional(SHARE),
            "gradient_checkpointing": one_of(False),
            "hidden_act": ACTIVATION,
            "hidden_dropout_prob": SHARE,
            "hidden_size": SIZE,
            "intermediate_size": SIZE,
            "is_decoder": one_of(False),
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
            "apply_residual_connection_post_layernorm": YES_OR_NO,
            "attention_softmax_in_fp32": YES_OR_NO,
            "hidden_dropout": SHARE,
            "hidden_size": SIZE,
            "layer_norm_epsilon": real(0, 1),
            "masked_softmax_fusion": YES_OR_NO,
            "n_embed": SIZE,
            "n_head": HEADS,
            "n_inner": one_of(None),
            "n_layer": LAYERS,
            "num_attention_heads": HEADS,
            "num_hidden_layers": LAYERS,
            "offset_alibi": whole(0, 1 << 12),
            "pretraining_tp": whole(1, 1 << 12),
            "seq_length": SIZE,
            "skip_bias_add": YES_OR_NO,
            "skip_bias_add_qkv": YES_OR_NO,
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
            **_MASKING,
            "activation_dropout": SHARE,
            "activation_function": ACTIVATION,
            "apply_spec_augment": YES_OR_NO,
            "begin_suppress_tokens": optional(listed(TOKEN)),
            "classifier_proj_size": SIZE,
            "d_model": SIZE,
            "decoder_attention_heads": HEADS,
            "decoder_ffn_dim": SIZE,
            "decoder_layerdrop": number(0, 0.999),
            "decoder_layers": LAYERS,
            "decoder_start_token_id": TOKEN,
            "dropout": SHARE,
            "encoder_attention_heads": HEADS,
            "encoder_ffn_dim": SIZE,
            "encoder_layerdrop": number(0, 0.999),
            "encoder_layers": LAYERS,
            "forced_decoder_ids": optional(listed(listed(optional(TOKEN)))),
            "init_std": real(0, 1),
            "is_encoder_decoder": one_of(True),
            "max_length": SIZE,
            # The full reader tells the encoder from the decoder by its length.
            "max_source_positions": whole(128, 1 << 14),
            "max_target_positions": POSITIONS,
            "median_filter_width": whole(1, 1 << 12),
            "num_hidden_layers": LAYERS,
            "num_mel_bins": whole(1, 1 << 12),
            "scale_embedding": YES_OR_NO,
            "suppress_tokens": optional(listed(TOKEN)),
            "use_weighted_layer_sum": one_of(False),
        },
        defaults={"max_source_positions": 1500},
        read=_whisper,
        required=(
            *("d_model", "encoder_layers", "encoder_attention_heads", "decoder_layers"),
            "decoder_attention_heads",
        ),
    ),
}
"""Model types that are no decoders with rotary embeddings, by name."""
