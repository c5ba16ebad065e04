"""Hostile requests to the example engine: each is refused at once or fails alone, and the others get their tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine import Engine
from small_models import random_prompts, small_model

from attnplug.core.errors import BatchError

pytestmark = pytest.mark.attack("engine")

PROMPTS = random_prompts(20, 7, 33)
REFUSED = {
    "a token past the vocabulary": ([512], {}),
    "a token far past it": ([2**63], {}),
    "a negative token": ([3, -1], {}),
    "floats": ([1.0, 2.0], {}),
    "bools": ([True], {}),
    "numpy floats": (np.array([1.5]), {}),
    "nothing": (None, {}),
    "text": ("text", {}),
    "bytes": (b"12", {}),
    "an empty prompt": ([], {}),
    "a tensor of rows": (torch.zeros(2, 2, dtype=torch.int64), {}),
    "a number": (7, {}),
    "max_tokens of -1000": ([1], {"max_tokens": -1000}),
    "max_tokens of 0": ([1], {"max_tokens": 0}),
    "max_tokens of 1e9": ([1], {"max_tokens": 10**9}),
    "max_tokens as a float": ([1], {"max_tokens": 2.5}),
    "max_tokens as text": ([1], {"max_tokens": "8"}),
    "max_tokens of None": ([1], {"max_tokens": None}),
    "stop as a number": ([1], {"stop": 3}),
    "stop as text": ([1], {"stop": "end"}),
    "stop of another type": ([1], {"stop": [None]}),
    "stop past the vocabulary": ([1], {"stop": [512]}),
    "a negative temperature": ([1], {"temperature": -1.0}),
    "a temperature of nan": ([1], {"temperature": float("nan")}),
    "an infinite temperature": ([1], {"temperature": float("inf")}),
    "a temperature that underflows": ([1], {"temperature": 1e-320}),
    "a temperature as text": ([1], {"temperature": "hot"}),
    "a seed as a float": ([1], {"seed": 0.5}),
    "a seed past 64 bits": ([1], {"seed": 2**70}),
    "a seed of None": ([1], {"seed": None}),
}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The outputs of PROMPTS without any attack."""
    engine = Engine(small_model("Llama"))
    requests = [engine.add(prompt, max_tokens=12) for prompt in PROMPTS]
    for _ in engine.stream():
        pass
    return [request.output for request in requests]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(small_model("Llama"))


def finish(engine: Engine) -> None:
    for _ in engine.stream():
        pass
    assert engine.builder.num_reqs == 0
    assert engine.runtime.block_pool.num_free == engine.runtime.block_pool.num_blocks - 1


def test_refused_requests_leave_nothing_behind_and_the_others_get_their_tokens(engine, expected):
    requests = []
    for prompt in PROMPTS:
        requests.append(engine.add(prompt, max_tokens=12))
        engine.step()
        for tokens, sampling in REFUSED.values():
            with pytest.raises(BatchError):
                engine.add(tokens, **sampling)
        with pytest.raises(BatchError):
            next(engine.stream([PROMPTS[0], [1, -1]]))
        with pytest.raises(TypeError, match="computed"):
            engine.add([1, 2], computed=1)
    assert not engine.waiting
    finish(engine)
    assert [request.output for request in requests] == expected


def test_integers_of_numpy_and_torch_are_tokens(engine, expected):
    given = [np.array(PROMPTS[0]), torch.tensor(PROMPTS[1]), iter(PROMPTS[2])]
    requests = [engine.add(prompt, max_tokens=np.int64(12)) for prompt in given]
    finish(engine)
    assert [request.output for request in requests] == expected


def test_a_stop_list_that_its_owner_changes_ends_no_other_output(engine, expected):
    stop = [expected[0][5]]
    first = engine.add(PROMPTS[0], max_tokens=12, stop=stop)
    second = engine.add(PROMPTS[1], max_tokens=12, stop=stop)
    engine.step()
    stop[:] = expected[1]
    finish(engine)
    assert first.output == expected[0][: expected[0].index(expected[0][5]) + 1]
    cut = expected[1].index(expected[0][5]) + 1 if expected[0][5] in expected[1] else 12
    assert second.output == expected[1][:cut]


def test_a_model_that_raises_in_a_step_loses_no_token(engine, expected, monkeypatch):
    requests = [engine.add(prompt, max_tokens=12) for prompt in PROMPTS]
    layers = engine.model.model.layers
    for steps in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(layers[-1], "forward", lambda *_, **__: 1 / 0)
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    engine.step()
        assert [len(request.output) for request in requests] == [steps] * 3
        engine.step()
    finish(engine)
    assert [request.output for request in requests] == expected


def test_a_request_whose_logits_are_not_finite_fails_alone(engine, expected):
    # A token of its own, whose embedding is NaN.
    used = {token for tokens in (*PROMPTS, *expected) for token in tokens}
    poison = next(token for token in range(512) if token not in used)
    weight = engine.model.get_input_embeddings().weight
    kept = weight.data[poison].clone()
    weight.data[poison] = torch.nan
    try:
        requests = [engine.add(prompt, max_tokens=12) for prompt in PROMPTS]
        bad = [
            engine.add([*PROMPTS[0], poison] * 2, temperature=temperature, max_tokens=12)
            for temperature in (0.0, 0.7)
        ]
        finish(engine)
    finally:
        weight.data[poison] = kept
    assert [request.output for request in requests] == expected
    assert [(request.output, request.error) for request in bad] == [
        ([], "the model gave logits of NaN or infinity")
    ] * 2
    again = engine.add([*PROMPTS[0], poison] * 2, max_tokens=3)
    finish(engine)
    assert len(again.output) == 3
    assert not again.error


def test_a_prompt_past_the_model_s_positions_is_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    engine = Engine(GPT2LMHeadModel(config).eval(), num_blocks=64)
    with pytest.raises(BatchError, match=r"len\(prompt\)=25 must be in 1 .. 24 with max_tokens=8"):
        engine.add([1] * 25, max_tokens=8)
    request = engine.add([1] * 24, max_tokens=8)
    finish(engine)
    assert len(request.output) == 8


def test_cancelled_requests_leave_the_others_alone(engine, expected):
    requests = [engine.add(prompt, max_tokens=12) for prompt in PROMPTS]
    waiting = engine.add(PROMPTS[0], max_tokens=50)
    engine.cancel(waiting)
    running = engine.add(PROMPTS[1], max_tokens=50)
    engine.step()
    engine.step()
    engine.cancel(running)
    engine.cancel(running)
    finish(engine)
    assert [request.output for request in requests] == expected
    assert (waiting.output, len(running.output)) == ([], 2)
