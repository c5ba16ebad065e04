"""TORCH's recurrences and convolution against the oracle in float64."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, draw

from attnplug.backends.torch_native.state.convolution import convolve
from attnplug.backends.torch_native.state.recurrence import many_tokens, one_token
from attnplug.core import LayerSpec
from attnplug.testing.state_oracle import StateInputs, first_state, reference_states

RECURRENT = [name for name in FAMILIES if name != "conv"]


def heads_of(spec: LayerSpec, inputs: StateInputs) -> tuple[torch.Tensor, ...]:
    assert inputs.key is not None
    assert inputs.value is not None
    assert inputs.decay is not None
    shared = spec.num_heads // spec.num_kv_heads
    decay = inputs.decay if inputs.decay.ndim == 3 else inputs.decay[..., None]
    query, key = (each.repeat_interleave(shared, 1) for each in (spec.scale * inputs.query, inputs.key))
    return query, key, inputs.value, decay


def worst(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).abs().max() / right.abs().max().clamp_min(1e-300))


@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 64, 131])
@pytest.mark.parametrize("family", RECURRENT)
def test_chunks_equal_the_recurrence_of_the_oracle(family: str, tokens: int, strong: bool) -> None:
    spec, inputs = FAMILIES[family], draw(family, tokens, strong=strong)
    state = torch.randn(
        first_state(spec).shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    right, states = reference_states(spec, inputs, state)
    for chunk in (None, 1, 16, 64):
        found, last = many_tokens(*heads_of(spec, inputs), inputs.beta, state, chunk)
        assert worst(found, right) < 1e-10
        assert worst(last, states[-1]) < 1e-10


@pytest.mark.parametrize("family", RECURRENT)
def test_single_tokens_equal_the_oracle(family: str) -> None:
    spec, inputs = FAMILIES[family], draw(family, 20)
    right, states = reference_states(spec, inputs)
    state, parts = first_state(spec)[None], heads_of(spec, inputs)
    for token in range(20):
        beta = None if inputs.beta is None else inputs.beta[token : token + 1]
        rows = (each[token : token + 1] for each in parts)
        found, state = one_token(*rows, beta, state)
        assert worst(found[0], right[token]) < 1e-10
    assert worst(state[0], states[-1]) < 1e-10


def test_a_convolution_in_steps_equals_one_run() -> None:
    spec, inputs = FAMILIES["conv"], draw("conv", 50)
    right, states = reference_states(spec, inputs)
    assert inputs.weight is not None
    at, state = 0, first_state(spec)[None]
    for count in (1, 2, 20, 1, 26):
        rows = inputs.query[None, at : at + count]
        found, state = convolve(rows, inputs.weight, inputs.bias, state, "silu")
        assert worst(found[0], right[at : at + count]) < 1e-12
        assert torch.equal(state[0], states[at + count - 1])
        at += count


def test_differences_of_strong_decays_do_not_overflow() -> None:
    spec, inputs = FAMILIES["kda"], draw("kda", 100, strong=True)
    assert inputs.decay is not None
    assert float(inputs.decay.sum(0).max()) < -700
    found, _ = many_tokens(*heads_of(spec, inputs), inputs.beta, first_state(spec))
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("strong", [-30.0, -1e3, -1e6, -1e30, -torch.inf])
@pytest.mark.parametrize("family", [name for name in RECURRENT if name != "lightning"])
def test_a_token_that_forgets_all_changes_no_later_decay(family: str, strong: float) -> None:
    spec, inputs = FAMILIES[family], draw(family, 40)
    assert inputs.decay is not None
    inputs.decay[10] = strong
    inputs.decay[25, 0] = strong
    right, states = reference_states(spec, inputs)
    parts = (each.float() for each in heads_of(spec, inputs))
    beta = None if inputs.beta is None else inputs.beta.float()
    found, last = many_tokens(*parts, beta, first_state(spec).float())
    assert worst(found.double(), right) < 1e-5
    assert worst(last.double(), states[-1]) < 1e-5
