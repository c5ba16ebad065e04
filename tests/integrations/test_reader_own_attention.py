"""Families read by hand: their own attention gives the numbers of the spec that was read."""

from __future__ import annotations

import pytest
import torch

from attnplug.integrations.transformers import read_config

TOKENS = 7


def reference(spec, query, key, value, slopes):
    """[T, H, D] in float64 of [H, T, D]: scale, ALiBi, causality, softmax."""
    groups = spec.num_heads // spec.num_kv_heads
    key, value = (tensor.repeat_interleave(groups, dim=0) for tensor in (key, value))
    places = torch.arange(TOKENS)
    logits = query @ key.transpose(1, 2) * spec.scale
    logits -= slopes[:, None, None] * (places[:, None] - places[None, :]).abs()
    logits = logits.masked_fill(places[None, :] > places[:, None], -torch.inf)
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
