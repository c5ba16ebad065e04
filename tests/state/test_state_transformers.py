"""TORCH's forms of each family equal the functions of transformers, from the same projections."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.nn.functional import softplus
from transformers import AutoModelForCausalLM, Lfm2Config, MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from attnplug.backends.torch_native.state.convolution import convolve
from attnplug.backends.torch_native.state.recurrence import many_tokens
from attnplug.integrations.transformers import attention_decisions, register

TOKENS, HEADS, SIZE, SIZE_V = 70, 4, 16, 24
DRAWS = torch.Generator().manual_seed(3)


def function(family: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAWS)


def unit(rows: torch.Tensor) -> torch.Tensor:
    return rows * (rows.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def close(found: torch.Tensor, right: torch.Tensor) -> bool:
    return float((found - right).abs().max() / right.abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("family", "name", "rows"),
    [
        ("qwen3_next", "torch_chunk_gated_delta_rule", ()),
        ("qwen3_5", "torch_chunk_gated_delta_rule", ()),
        ("olmo_hybrid", "torch_chunk_gated_delta_rule", ()),
        ("kimi_linear", "chunk_kimi_delta_attention", (SIZE,)),
    ],
)
def test_delta_rules(family: str, name: str, rows: tuple[int, ...]) -> None:
    query, key, value = (
        normal(TOKENS, HEADS, SIZE),
        normal(TOKENS, HEADS, SIZE),
        normal(TOKENS, HEADS, SIZE_V),
    )
    decay = -softplus(normal(TOKENS, HEADS, *rows)) * 0.2
    # OLMo-Hybrid doubles its beta.
    beta = normal(TOKENS, HEADS).sigmoid() * (2.0 if family == "olmo_hybrid" else 1.0)
    state = normal(HEADS, SIZE, SIZE_V)
    given = [each[None] for each in (query, key, value, decay, beta)]
    right, last = function(family, name)(
        *given, initial_state=state[None], output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    gate = decay if rows else decay[..., None]
    found, own = many_tokens(unit(query) * SIZE**-0.5, unit(key), value, gate, beta, state)
    assert close(found, right[0])
    assert close(own, last[0])


@pytest.mark.parametrize("family", ["nemotron_h", "granitemoehybrid", "falcon_h1", "bamba", "zamba2"])
def test_mamba2(family: str) -> None:
    x, dt, a = normal(TOKENS, HEADS, SIZE_V), normal(TOKENS, HEADS), -normal(HEADS).exp()
    b, c, bias, state = (
        normal(TOKENS, 2, SIZE),
        normal(TOKENS, 2, SIZE),
        normal(HEADS),
        normal(HEADS, SIZE_V, SIZE),
    )
    right, last = function(family, "mamba2_chunk_scan")(
        *(each[None] for each in (x, dt)),
        a,
        *(each[None] for each in (b, c)),
        chunk_size=16,
        dt_bias=bias,
        dt_softplus=True,
        initial_states=state[None],
        return_final_states=True,
    )
    step = softplus(dt + bias)
    keys, queries = (each.repeat_interleave(2, 1) for each in (b, c))
    found, own = many_tokens(queries, keys, x * step[..., None], (a * step)[..., None], None, state.mT)
    assert close(found, right[0])
    # transformers stores a state of Mamba2 as [V, K].
    assert close(own.mT, last[0])


def test_mamba() -> None:
    x, dt, a = normal(HEADS, TOKENS), normal(HEADS, TOKENS), -normal(HEADS, SIZE).exp()
    b, c = normal(SIZE, TOKENS), normal(SIZE, TOKENS)
    given = x[None], dt[None], a, b[None], c[None]
    right, last = function("jamba", "mamba_selective_scan")(
        *given, delta_softplus=True, return_last_state=True
    )
    step = softplus(dt).T
    keys, queries = (each.T[:, None].expand(-1, HEADS, -1) for each in (b, c))
    zeros = torch.zeros(HEADS, SIZE, 1)
    found, own = many_tokens(queries, keys, (x.T * step)[..., None], a * step[..., None], None, zeros)
    assert close(found[..., 0].T, right[0])
    assert close(own[..., 0], last[0])


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "jamba", "kimi_linear"])
def test_convolutions(family: str) -> None:
    inputs, weight, bias = normal(TOKENS, 12), normal(12, 4), normal(12)
    right = function(family, "causal_conv1d_fn")(inputs.T[None], weight, bias, activation="silu")
    found, state = convolve(inputs[None], weight, bias, torch.zeros(1, 12, 3), "silu")
    assert close(found[0].T, right[0])
    assert torch.equal(state[0], inputs[-3:].T)


def test_lightning_attention() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "block_size": 16}
    layer = MiniMaxLightningAttention(MiniMaxConfig(**sizes, layer_types=["linear_attention"] * 4), 1).eval()
    hidden = normal(1, TOKENS, 32)
    with torch.no_grad():
        right = layer(hidden, (None, None), None)[0]
        rows = layer.act_fn(layer.qkv_proj(hidden))[0].view(TOKENS, 4, 24)
        decay = -layer.slope_rate.view(1, 4, 1).expand(TOKENS, -1, -1)
        found, _ = many_tokens(*rows.split(8, -1), decay, None, torch.zeros(4, 8, 8))
        output = torch.sigmoid(layer.output_gate(hidden)) * layer.norm(found.reshape(1, TOKENS, 32))
        assert close(layer.out_proj(output), right)


def test_a_model_of_transformers_says_once_which_layers_stay_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Lfm2Config(num_hidden_layers=3, vocab_size=100, full_attn_idxs=[2], **sizes)
    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="attnplug").eval()
    with torch.no_grad(), caplog.at_level("WARNING", "attnplug"):
        for _ in range(2):
            model(torch.arange(1, 9)[None])
    (said,) = [each.message for each in caplog.records if each.name == "attnplug"]
    assert said.startswith("transformers runs 2 layers that keep a state, such as model.layers.0.conv, by")
    assert list(attention_decisions(model)) == ["model.layers.2.self_attn"]
