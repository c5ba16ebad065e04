"""Families that compute their own attention: it gives the numbers of the spec that was read."""

from __future__ import annotations

import pytest
import torch

from attnplug.errors import ModelConfigError
from attnplug.integrations.transformers import read_config

TOKENS = 7


def reference(spec, query, key, value, slopes):
    """[T, H, D] in float64 of [H, T, D]: scale, ALiBi, causality, window, softmax."""
    groups = spec.num_heads // spec.num_kv_heads
    key, value = (tensor.repeat_interleave(groups, dim=0) for tensor in (key, value))
    places = torch.arange(TOKENS)
    logits = query @ key.transpose(1, 2) * spec.scale
    logits -= slopes[:, None, None] * (places[:, None] - places[None, :]).abs()
    logits = logits.masked_fill(places[None, :] > places[:, None], -torch.inf)
    if spec.window[0] >= 0:
        logits = logits.masked_fill(places[:, None] - places[None, :] > spec.window[0], -torch.inf)
    return (logits.softmax(-1) @ value).transpose(0, 1)


def real_model(config, attention="eager"):
    """The model class in float64 on the CPU, with random weights, and the one spec of its layers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config.dtype = "float32"
    model = (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    )
    (spec,) = set(read_config(config).layers.values())
    return model, spec


def seen_by(model, attention, dense):
    """The attention module's input, and what it hands to its output projection, [T, H * D] both."""
    kept = {}
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: kept.update(given=args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    dense.register_forward_pre_hook(lambda _, args: kept.update(output=args[0]))
    with torch.no_grad():
        model(torch.arange(TOKENS)[None] + 1, use_cache=False)
    return kept["given"][0], kept["output"][0]


def test_bloom(small):
    modeling = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    model, spec = real_model(small("Bloom"))
    attention = model.transformer.h[0].self_attention

    hidden, output = seen_by(model, attention, attention.dense)

    query, key, value = attention._reshape(attention.query_key_value(hidden[None]))
    bias = modeling.build_alibi_tensor(torch.ones(1, 2), spec.num_heads, torch.float64)
    slopes = bias[:, 0, 1] - bias[:, 0, 0]
    torch.testing.assert_close(
        output.unflatten(1, (4, 16)), reference(spec, query[0], key[0], value[0], slopes)
    )


@pytest.mark.parametrize("grouped", [True, False])
def test_falcon_with_alibi(grouped, small):
    modeling = pytest.importorskip("transformers.models.falcon.modeling_falcon")
    fields = {"new_decoder_architecture": True, "num_kv_heads": 2} if grouped else {}
    # The eager form of 5.17 adds its bias twice, to the mask and to the logits; sdpa adds it once.
    model, spec = real_model(small("Falcon", alibi=True, **fields), "sdpa")
    attention = model.transformer.h[0].self_attention

    hidden, output = seen_by(model, attention, attention.dense)

    parts = [
        part[0].transpose(0, 1) for part in attention._split_heads(attention.query_key_value(hidden[None]))
    ]
    step = parts[1].shape[0] // spec.num_kv_heads
    query, key, value = parts[0], parts[1][::step], parts[2][::step]
    bias = modeling.build_alibi_tensor(torch.ones(1, 2), spec.num_heads, torch.float64)
    slopes = (bias[:, 0, 1] - bias[:, 0, 0]) * spec.scale
    expected = reference(spec, query, key, value, slopes)
    torch.testing.assert_close(output.unflatten(1, (4, 16)), expected, atol=1e-5, rtol=1e-4)


def test_mpt(small):
    modeling = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    model, spec = real_model(small("Mpt", attn_config={"softmax_scale": 0.3}))
    attention = model.transformer.blocks[0].attn

    hidden, output = seen_by(model, attention, attention.out_proj)

    parts = attention.Wqkv(hidden).chunk(3, dim=-1)
    query, key, value = (part.unflatten(1, (4, 16)).transpose(0, 1) for part in parts)
    bias = modeling.build_mpt_alibi_tensor(spec.num_heads, 2)
    slopes = (bias[:, 0, 1] - bias[:, 0, 0]).double()
    expected = reference(spec, query, key, value, slopes)
    torch.testing.assert_close(output.unflatten(1, (4, 16)), expected, atol=1e-5, rtol=1e-4)


OWN = {
    "GPTJ": {"rotary_dim": 8},
    "CodeGen": {"rotary_dim": 8},
    "GPTNeo": {
        "attention_types": [[["global", "local"], 2]],
        "num_layers": 4,
        "num_heads": 4,
        "window_size": 3,
    },
    "ImageGPT": {"scale_attn_by_inverse_layer_idx": True},
}
"""Decoders whose method `_attn` takes queries, keys and values, [1, H, T, D]."""
SCALES = {
    "GPTJ": [0.25] * 4,
    "CodeGen": [0.25] * 4,
    "GPTNeo": [1.0] * 4,
    "ImageGPT": [0.25, 0.125, 0.25 / 3, 0.0625],
}


@pytest.mark.parametrize("name", OWN)
def test_decoders_with_a_method_of_their_own(name, small, monkeypatch):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = small(name, dtype="float32", **OWN[name])
    specs = list(read_config(config).layers.values())
    model = transformers.AutoModel.from_config(config).double().eval()
    (cls,) = {type(module) for module in model.modules() if hasattr(module, "_attn")}
    seen, attend = [], cls._attn

    def kept(self, query, key, value, *args, **kwargs):
        output = attend(self, query, key, value, *args, **kwargs)
        seen.append((query[0].double(), key[0].double(), value[0].double(), output[0][0].transpose(0, 1)))
        return output

    monkeypatch.setattr(cls, "_attn", kept)
    with torch.no_grad():
        model(torch.arange(TOKENS)[None] + 1, use_cache=False)

    assert [spec.scale for spec in specs] == SCALES[name]
    assert len(specs) == len(seen) == 4
    for spec, (query, key, value, output) in zip(specs, seen, strict=True):
        expected = reference(spec, query, key, value, torch.zeros(spec.num_heads))
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-4)


def test_gpt_neo_has_windows_on_its_local_layers(small):
    specs = read_config(small("GPTNeo", **OWN["GPTNeo"])).layers

    assert [spec.window for spec in specs.values()] == [(-1, 0), (2, 0)] * 2
    assert next(iter(specs)) == "transformer.h.0.attn.attention"
    assert not any(spec.direct_kv for spec in specs.values())


def test_mgp_str(small):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = small("Mgpstr", dtype="float32")
    model = transformers.MgpstrForSceneTextRecognition(config).double().eval()
    layers = read_config(config).layers

    assert list(layers) == [f"mgp_str.encoder.blocks.{i}.attn" for i in range(4)]
    (spec,) = set(layers.values())
    assert (spec.attn_type, spec.num_heads, spec.head_size, spec.scale) == ("encoder_only", 4, 16, 0.25)
    attention, hidden = model.mgp_str.encoder.blocks[0].attn, torch.randn(1, TOKENS, 64, dtype=torch.float64)
    parts = attention.qkv(hidden)[0].unflatten(-1, (3, 4, 16)).permute(1, 2, 0, 3)
    query, key, value = parts
    expected = ((query @ key.transpose(1, 2) * spec.scale).softmax(-1) @ value).transpose(0, 1).flatten(1)
    torch.testing.assert_close(attention(hidden)[0][0], attention.proj(expected))


def test_attention_that_changes_with_the_length_of_the_text_is_refused(small):
    with pytest.raises(
        ModelConfigError, match="BigBirdForMaskedLM attends otherwise in a text of 1021 tokens"
    ):
        read_config(small("BigBird", max_position_embeddings=4096))


def test_a_decoder_that_runs_its_last_token_alone_is_refused(small):
    sizes = {
        "d_model": 64,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
    }
    heads = {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "src_vocab_size": 64,
        "tgt_vocab_size": 64,
    }

    # transformers 5.23 gives this layer all tokens and no mask, and earlier versions the last token alone.
    reasons = "one query and one key, which show no mask|Attention is not causal in the decoder"
    with pytest.raises(ModelConfigError, match=reasons):
        read_config(small("FSMT", langs=["en", "de"], **sizes, **heads))


def test_spans_of_images_that_see_each_other_are_asked_for(small):
    text = [spec for path, spec in read_config(small("Git")).layers.items() if "image_encoder" not in path]

    assert {(spec.attn_type, spec.causal, spec.mm_prefix) for spec in text} == {("decoder", True, True)}


def test_a_family_that_attends_by_its_own_code_is_refused_through_transformers(small):
    with pytest.raises(
        ModelConfigError, match="GPTJAttention computes attention of its own and would never call"
    ):
        read_config(small("GPTJ", rotary_dim=8), client="transformers")
