"""State layers in float64, token by token: the answers to compare a backend's with, and the steps of the runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.functional import silu

from attnplug.core.spec import LayerSpec
from attnplug.core.state.caches import state_cache_for


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StateInputs:
    """The inputs of a state layer for T tokens of one request, or of several, packed.

    Args:
        query: `[T, Hk, K]`, or the one input `[T, C]` of a convolution.
        key: `[T, Hk, K]`.
        value: `[T, Hv, V]`.
        decay: `[T, Hv]` or `[T, Hv, K]`, in natural log.
        beta: `[T, Hv]`.
        weight: of a convolution, `[C, W]`, for all tokens.
        bias: `[C]`, or None.
    """

    query: torch.Tensor
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    decay: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Rows of the query."""
        return self.query.shape[0]

    def rows(self, where: slice | Sequence[int]) -> StateInputs:
        """The inputs of some tokens."""
        changed: dict[str, Any] = {
            name: None if each is None else each[where] for name, each in self.by_token().items()
        }
        return dataclasses.replace(self, **changed)

    def by_token(self) -> dict[str, torch.Tensor | None]:
        """The inputs with a row for each token, by name."""
        return {name: getattr(self, name) for name in ("query", "key", "value", "decay", "beta")}

    def joined(self, *others: StateInputs) -> StateInputs:
        """These tokens, and those of the others after them."""
        parts = [each.by_token() for each in (self, *others)]
        changed: dict[str, Any] = {
            name: None if first is None else torch.cat([p for part in parts if (p := part[name]) is not None])
            for name, first in parts[0].items()
        }
        return dataclasses.replace(self, **changed)


StateAnswer: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The outputs of all tokens, and the state after each of them."""


def first_state(spec: LayerSpec) -> torch.Tensor:
    """The state of a request without tokens, float64 zeros `[Hv, K, V]`, or `[C, W - 1]` of a convolution."""
    cache = state_cache_for(spec)
    return torch.zeros(() if cache is None else cache.shape, dtype=torch.float64)


def reference_states(spec: LayerSpec, inputs: StateInputs, state: torch.Tensor | None = None) -> StateAnswer:
    """The outputs and the state after each token, in float64.

    Args:
        spec: of the layer.
        inputs: of one request, in any dtype.
        state: before the first token; None for zeros.
    """
    state = first_state(spec) if state is None else state.double()
    if inputs.key is None:
        return _convolution(spec, inputs, state)
    shared = spec.num_heads // spec.num_kv_heads
    query = spec.scale * inputs.query.double().repeat_interleave(shared, 1)
    key = inputs.key.double().repeat_interleave(shared, 1)
    outputs, states = [], []
    for token in range(inputs.tokens):
        gate = _of(inputs.decay, token)
        state = state * (gate if gate.ndim == 2 else gate[:, None]).exp()[..., None]
        update = _of(inputs.value, token)
        if inputs.beta is not None:
            seen = torch.einsum("hk,hkv->hv", key[token], state)
            update = _of(inputs.beta, token)[:, None] * (update - seen)
        state = state + key[token][..., None] * update[:, None]
        outputs.append(torch.einsum("hk,hkv->hv", query[token], state))
        states.append(state)
    if not outputs:
        return state.new_zeros(0, spec.num_heads, spec.head_size_v), state.new_zeros(0, *state.shape)
    return torch.stack(outputs), torch.stack(states)


def _of(rows: torch.Tensor | None, token: int) -> torch.Tensor:
    return torch.empty(0, dtype=torch.float64) if rows is None else rows[token].double()


def _convolution(spec: LayerSpec, inputs: StateInputs, state: torch.Tensor) -> StateAnswer:
    weight = torch.empty(0) if inputs.weight is None else inputs.weight.double()
    width = weight.shape[1]
    every = torch.cat([state, inputs.query.double().T], dim=1)
    windows = every.unfold(1, width, 1)
    outputs = torch.einsum("ctw,cw->tc", windows, weight)
    if inputs.bias is not None:
        outputs = outputs + inputs.bias.double()
    if spec.state is not None and spec.state.activation == "silu":
        outputs = silu(outputs)
    states = every[:, 1:].unfold(1, width - 1, 1).transpose(0, 1)
    return outputs, states[: inputs.tokens]
