"""Mistakes in the rules of state layers: the outputs of a step that each one gives, to name what a backend did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from attnplug.core.spec import LayerSpec
from attnplug.testing.state_oracle import StateInputs, first_state, reference_states


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StateStepOf:
    """The tokens of one request in a step, and the states that a backend may have taken for its own.

    Args:
        spec: the layer.
        inputs: of these tokens.
        state: the right one before them.
        others: by words, other states that a mistake may start from.
    """

    spec: LayerSpec
    inputs: StateInputs
    state: torch.Tensor
    others: Mapping[str, torch.Tensor]


def recognise_state(
    step: StateStepOf, found: torch.Tensor, is_close: Callable[[torch.Tensor, torch.Tensor], bool]
) -> str | None:
    """The mistake that gives the outputs `found [n, Hv, V]` of a step; None if no one alone explains them."""
    found = found.double()
    for name, outputs in _candidates(step):
        if outputs.shape == found.shape and is_close(found, outputs):
            return name
    return None


def _candidates(step: StateStepOf) -> Iterator[tuple[str, torch.Tensor]]:
    spec, inputs = step.spec, step.inputs
    for name, state in step.others.items():
        yield f"the step starts from {name}", reference_states(spec, inputs, state)[0]
    if inputs.key is None:
        yield from _of_convolutions(step)
        return
    for name, change in _INPUTS.items():
        changed = change(spec, inputs)
        if changed is not None:
            yield name, reference_states(changed[0], changed[1], step.state)[0]
    for name, rules in _ORDERS.items():
        if inputs.beta is not None or not rules.get("delta_alone"):
            given = {field: value for field, value in rules.items() if field != "delta_alone"}
            yield name, _recurrence(spec, inputs, step.state, **given)
    if spec.head_size == spec.head_size_v:
        yield "K and V of the state are swapped", reference_states(spec, inputs, step.state.mT)[0]


def _of_convolutions(step: StateStepOf) -> Iterator[tuple[str, torch.Tensor]]:
    spec, inputs, dims = step.spec, step.inputs, step.spec.state
    weight = torch.empty(0) if inputs.weight is None else inputs.weight
    yield "the taps of a convolution are flipped", _outputs(step, weight=weight.flip(1))
    if inputs.bias is not None:
        yield "the bias of a convolution is ignored", _outputs(step, bias=None)
    if dims is not None:
        other = None if dims.activation else "silu"
        changed = spec.replace(state=dataclasses.replace(dims, activation=other))
        name = "ignored" if dims.activation else "applied, and the layer has none"
        yield f"the activation of a convolution is {name}", reference_states(changed, inputs, step.state)[0]


def _outputs(step: StateStepOf, **changes: Any) -> torch.Tensor:
    return reference_states(step.spec, dataclasses.replace(step.inputs, **changes), step.state)[0]


_Changed = tuple[LayerSpec, StateInputs] | None


def _of_decay(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[LayerSpec, StateInputs], _Changed]:
    def changed(spec: LayerSpec, inputs: StateInputs) -> _Changed:
        decay = torch.zeros(0) if inputs.decay is None else inputs.decay
        return spec, dataclasses.replace(inputs, decay=change(decay.double()))

    return changed


def _of_scale(change: Callable[[LayerSpec], float]) -> Callable[[LayerSpec, StateInputs], _Changed]:
    def changed(spec: LayerSpec, inputs: StateInputs) -> _Changed:
        scale = change(spec)
        return None if scale == spec.scale else (spec.replace(scale=scale), inputs)

    return changed


def _key_heads(spec: LayerSpec, inputs: StateInputs) -> _Changed:
    """Value head h with the key head h % Hk."""
    if spec.num_kv_heads in (1, spec.num_heads) or inputs.key is None:
        return None
    heads = torch.arange(spec.num_heads) % spec.num_kv_heads
    every = dataclasses.replace(inputs, query=inputs.query[:, heads], key=inputs.key[:, heads])
    return spec.replace(num_kv_heads=spec.num_heads), every


def _of_rows(decay: torch.Tensor) -> torch.Tensor:
    return decay if decay.ndim < 3 else decay[..., :1].expand_as(decay)


def _beta(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[LayerSpec, StateInputs], _Changed]:
    def changed(spec: LayerSpec, inputs: StateInputs) -> _Changed:
        return (
            None
            if inputs.beta is None
            else (spec, dataclasses.replace(inputs, beta=change(inputs.beta.double())))
        )

    return changed


_INPUTS: Mapping[str, Callable[[LayerSpec, StateInputs], _Changed]] = {
    "the decay is ignored": _of_decay(torch.zeros_like),
    "the decay is taken as a factor, not as its logarithm": _of_decay(lambda g: g.exp()),
    "the decay is taken as a logarithm to base 2": _of_decay(lambda g: g * 0.6931471805599453),
    "the decay is applied twice": _of_decay(lambda g: 2 * g),
    "the decay has the wrong sign": _of_decay(lambda g: -g),
    "the decay of the next head": _of_decay(lambda g: g.roll(-1, 1)),
    "the decay of the next token": _of_decay(lambda g: g.roll(-1, 0)),
    "the decay of the first row for all rows": _of_decay(_of_rows),
    "the decay in bfloat16": _of_decay(lambda g: g.to(torch.bfloat16).double()),
    "the scale is ignored": _of_scale(lambda spec: 1.0),
    "the scale is that of K, not the layer's": _of_scale(lambda spec: spec.head_size**-0.5),
    "the scale is that of V": _of_scale(lambda spec: spec.head_size_v**-0.5),
    "the scale is applied twice": _of_scale(lambda spec: spec.scale**2),
    "value heads have the key heads h % Hk": _key_heads,
    "beta is ignored": _beta(torch.ones_like),
    "beta is applied twice": _beta(lambda beta: beta * beta),
    "beta passes through a sigmoid again": _beta(torch.sigmoid),
}
_ORDERS: Mapping[str, dict[str, Any]] = {
    "the decay comes after the update": {"order": "uda", "delta": "now"},
    "the output comes before the update": {"order": "dau", "delta": "now"},
    "the delta is computed before the decay": {"order": "dua", "delta": "before", "delta_alone": True},
    "the delta rule is ignored": {"order": "dua", "delta": "none", "delta_alone": True},
    "beta is applied to the value only": {"order": "dua", "delta": "value", "delta_alone": True},
}


def _recurrence(
    spec: LayerSpec, inputs: StateInputs, state: torch.Tensor, order: str, delta: str
) -> torch.Tensor:
    """The outputs with decay (d), update (u) and answer (a) in another order, or another delta."""
    shared, outputs = spec.num_heads // spec.num_kv_heads, []
    given = inputs.by_token()
    parts = {name: torch.zeros(0) if each is None else each.double() for name, each in given.items()}
    query = spec.scale * parts["query"].repeat_interleave(shared, 1)
    key = parts["key"].repeat_interleave(shared, 1)
    gates, values, betas = parts["decay"], parts["value"], parts["beta"]
    for token in range(inputs.tokens):
        gate, k, v = gates[token], key[token], values[token]
        beta = betas[token][:, None] if betas.numel() else torch.ones(())
        seen = torch.einsum("hk,hkv->hv", k, state)
        for part in order:
            if part == "d":
                state = state * (gate if gate.ndim == 2 else gate[:, None]).exp()[..., None]
            elif part == "a":
                outputs.append(torch.einsum("hk,hkv->hv", query[token], state))
            else:
                now = torch.einsum("hk,hkv->hv", k, state) if delta != "before" else seen
                update = v
                if betas.numel():
                    update = {"none": beta * v, "value": beta * v - now}.get(delta, beta * (v - now))
                state = state + k[..., None] * update[:, None]
    return torch.stack(outputs)


def other_states(
    spec: LayerSpec, before: Sequence[torch.Tensor], neighbours: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """States that a step may start from by mistake: zeros, an earlier one of the request, or that of another request.

    Args:
        spec: the layer.
        before: the states of the request after each of its tokens, the last one the right start.
        neighbours: by name, the states of the other requests of the step.
    """
    found = {"zeros": first_state(spec)}
    if len(before) > 1:
        found["the state before the last token"] = before[-2]
    found |= {f"the state of request {name}": state for name, state in neighbours.items()}
    return found
