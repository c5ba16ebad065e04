"""Encoders, and encoders with decoders."""

from __future__ import annotations

from collections import Counter

import pytest

from attnplug.core.spec import LayerSpec
from attnplug.integrations.transformers import read_config

ENCODER = LayerSpec(num_heads=4, num_kv_heads=4, head_size=16, attn_type="encoder_only", direct_kv=True)


@pytest.mark.parametrize("name", ["Bert", "Roberta", "Electra", "DistilBert", "Albert", "Ernie"])
def test_an_encoder_sees_everything_and_keeps_no_cache(name, small):
    fields = {"n_heads": 4, "dim": 64, "n_layers": 4} if name == "DistilBert" else {}

    specs = list(read_config(small(name, **fields)).layers.values())

    assert specs == [ENCODER] * 4


def test_layers_that_share_weights_are_layers_of_their_own(small):
    names = list(read_config(small("Albert")).layers)

    path = "albert.encoder.albert_layer_groups.0.albert_layers.0.attention"
    assert names == [path, f"{path}#2", f"{path}#3", f"{path}#4"]


def test_modern_bert_windows_both_sides(small):
    config = small(
        "ModernBert", local_attention=8, global_attn_every_n_layers=3, cls_token_id=1, sep_token_id=2
    )

    windows = [spec.window for spec in read_config(config).layers.values()]

    assert windows == [(-1, -1), (4, 4), (4, 4), (-1, -1)]


def test_a_decoder_made_bidirectional_is_an_encoder(small):
    kinds = ["sliding_attention", "full_attention"] * 2
    config = small("Gemma3Text", use_bidirectional_attention=True, sliding_window=8, layer_types=kinds)

    specs = list(read_config(config).layers.values())

    assert {(str(spec.attn_type), spec.causal, spec.direct_kv) for spec in specs} == {
        ("encoder_only", False, True)
    }
    assert [spec.window for spec in specs] == [(4, 4), (-1, -1)] * 2


def test_bert_as_a_decoder_is_causal(small):
    specs = list(read_config(small("Bert", is_decoder=True)).layers.values())

    assert specs == [LayerSpec(num_heads=4, num_kv_heads=4, head_size=16)] * 4


def test_bert_as_a_decoder_may_read_an_encoder(small):
    model = read_config(small("Bert", is_decoder=True, add_cross_attention=True))

    assert Counter(str(spec.attn_type) for spec in model.layers.values()) == {
        "decoder": 4,
        "encoder_decoder": 4,
    }


@pytest.mark.parametrize("name", ["Bart", "MBart", "Marian", "Pegasus", "Blenderbot"])
def test_an_encoder_decoder_has_three_kinds_of_layers(name, small):
    config = small(
        name,
        d_model=64,
        encoder_layers=3,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
    )

    model = read_config(config, kv_cache_dtype="fp8")

    decoder = LayerSpec(num_heads=2, num_kv_heads=2, head_size=32, kv_cache_dtype="fp8")
    assert Counter(model.layers.values()) == {
        ENCODER.replace(attn_type="encoder"): 3,
        decoder: 2,
        decoder.replace(attn_type="encoder_decoder", causal=False, window=(-1, -1)): 2,
    }
    assert "model.decoder.layers.1.encoder_attn" in model.layers


def test_whisper_reads_its_features(small):
    sizes = {"d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = small("Whisper", **sizes, encoder_layers=1, decoder_layers=1, max_source_positions=50)

    kinds = [str(spec.attn_type) for spec in read_config(config).layers.values()]

    assert kinds == ["encoder", "decoder", "encoder_decoder"]
