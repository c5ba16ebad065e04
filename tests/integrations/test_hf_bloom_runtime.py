"""Bloom computes its own ALiBi attention; its q, k and v through AttentionRuntime give the same logits."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

import attnplug
from attnplug.core import BuilderConfig, LayerTensors
from attnplug.integrations.transformers import read_config
from attnplug.runtime import AttentionRuntime

transformers = pytest.importorskip("transformers")
LENGTHS = (21, 9, 1)


def small_bloom() -> Any:
    torch.manual_seed(0)
    config = transformers.BloomConfig(
        hidden_size=96, n_layer=3, n_head=6, vocab_size=97, dtype="float32", use_cache=False
    )
    return transformers.BloomForCausalLM(config).eval()


def slopes_of(heads: int) -> torch.Tensor:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    # The bias of position 1 is the slope itself.
    return build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1].contiguous()


def attend_by(runtime: AttentionRuntime, name: str, valid: torch.Tensor) -> Any:
    """A BloomAttention.forward whose scores and softmax are the runtime's, over the valid tokens packed."""

    def forward(module: Any, hidden: torch.Tensor, residual: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        parts = module._reshape(module.query_key_value(hidden))
        query, key, value = (part.transpose(1, 2)[valid].contiguous() for part in parts)
        context = torch.zeros(*hidden.shape)
        context[valid] = runtime.forward(name, query, key, value).flatten(1)
        return module.dense(context) + residual, None

    return forward


def left_padded(tokens: torch.Tensor) -> torch.Tensor:
    places = torch.arange(tokens.shape[1])
    return places >= tokens.shape[1] - torch.tensor(LENGTHS)[:, None]


def test_bloom_with_its_attention_run_by_attnplug_equals_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_bloom()
    tokens = torch.randint(3, 97, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    valid = left_padded(tokens)
    with torch.no_grad():
        expected = model(tokens, attention_mask=valid.long()).logits[valid]

    layers = read_config(model.config)
    assert all(spec.has_alibi for spec in layers.layers.values())
    plan = attnplug.plan(layers, "cpu", num_blocks=64)
    tensors = LayerTensors(alibi_slopes=slopes_of(6))
    with AttentionRuntime(
        plan, dict.fromkeys(plan.decisions, tensors), config=BuilderConfig(max_num_seqs=4), debug=True
    ) as runtime:
        builder = runtime.step_batch_builder(64)
        for row, length in enumerate(LENGTHS):
            builder.add_request(str(row), [runtime.block_pool.allocate(-(-length // builder.block_sizes[0]))])
        runtime.begin_step(builder.step(LENGTHS))
        for name in plan.decisions:
            module = model.get_submodule(name)
            replaced = types.MethodType(attend_by(runtime, name, valid), module)
            monkeypatch.setattr(module, "forward", replaced)
        with torch.no_grad():
            found = model(tokens, attention_mask=valid.long()).logits[valid]
    error = (found - expected).abs() / expected.abs().clamp(min=1.0)
    assert error.max() < 1e-4


def test_bloom_without_its_slopes_is_refused_not_served_as_plain_attention() -> None:
    plan = attnplug.plan(read_config(small_bloom().config), "cpu", num_blocks=8)
    with pytest.raises(attnplug.errors.SpecError, match=r"alibi_slopes of layer .* is required"):
        AttentionRuntime(plan)
