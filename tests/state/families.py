"""Layers of each family of state layers, small, and random inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import softplus

from attnplug.core import LayerSpec
from attnplug.core.state.dims import StateDims
from attnplug.testing.state_oracle import StateInputs

_SIZES: dict[str, Any] = {"dtype": "float32"}
FAMILIES: dict[str, LayerSpec] = {
    "mamba": LayerSpec(
        num_heads=12,
        num_kv_heads=1,
        head_size=8,
        head_size_v=1,
        scale=1.0,
        state=StateDims(rule="linear", decay="row"),
        **_SIZES,
    ),
    "mamba2": LayerSpec(
        num_heads=6,
        num_kv_heads=2,
        head_size=8,
        head_size_v=5,
        scale=1.0,
        state=StateDims(rule="linear", decay="head"),
        **_SIZES,
    ),
    "gdn": LayerSpec(
        num_heads=4,
        num_kv_heads=2,
        head_size=8,
        head_size_v=5,
        state=StateDims(rule="delta", decay="head"),
        **_SIZES,
    ),
    "kda": LayerSpec(
        num_heads=3, num_kv_heads=3, head_size=8, state=StateDims(rule="delta", decay="row"), **_SIZES
    ),
    "lightning": LayerSpec(
        num_heads=3,
        num_kv_heads=3,
        head_size=8,
        scale=1.0,
        state=StateDims(rule="linear", decay="head"),
        **_SIZES,
    ),
    "conv": LayerSpec(
        num_heads=7,
        num_kv_heads=7,
        head_size=1,
        state=StateDims(rule="conv", width=4, activation="silu"),
        **_SIZES,
    ),
}
"""By family: a layer whose sizes all differ."""


def draw(family: str, tokens: int, *, seed: int = 0, strong: bool = False) -> StateInputs:
    """Random inputs in float64, with weak decays or with strong ones."""
    spec, generator = FAMILIES[family], torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if family == "conv":
        fixed = torch.Generator().manual_seed(7)
        weight, bias = (torch.randn(*shape, generator=fixed, dtype=torch.float64) for shape in ((7, 4), (7,)))
        return StateInputs(normal(tokens, 7), weight=weight, bias=bias)
    heads, keys, size = spec.num_heads, spec.num_kv_heads, spec.head_size
    assert spec.state is not None
    rows = (size,) if spec.state.decay == "row" else ()
    query, key = normal(tokens, keys, size), normal(tokens, keys, size)
    decay = -softplus(normal(tokens, heads, *rows)) * (60.0 if strong else 0.2)
    if family == "lightning":
        decay = -(2.0 ** -torch.arange(1.0, heads + 1, dtype=torch.float64)).expand(tokens, heads)
    if spec.state.rule == "delta":
        query, key = (each / each.norm(dim=-1, keepdim=True) for each in (query, key))
        return StateInputs(
            query, key, normal(tokens, heads, spec.head_size_v), decay, normal(tokens, heads).sigmoid()
        )
    return StateInputs(query, key, normal(tokens, heads, spec.head_size_v), decay)
