"""Random requests on a runtime of two KV groups, between hostile calls: each layer of each step equals the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model_layers import layer
from served_model import ServedModel
from test_wrong_types import WRONG, state

from attnplug.core import BuilderConfig
from attnplug.core.errors import BatchError
from attnplug.runtime import StepBatchBuilder

pytestmark = pytest.mark.attack("foreign batches")
LAYERS = {"full": layer(dtype="float32"), "window": layer(dtype="float32", sliding_window=20)}
LENGTH, TOKENS, BLOCKS = 48, 40, 32
# By number, because hypothesis prints what it drew, and one of them has no repr.
ONE = st.integers(0, len(WRONG) - 1)


class RuntimeMachine(RuleBasedStateMachine):
    """Up to three requests, whose steps and attacks come in any order."""

    def __init__(self) -> None:
        super().__init__()
        config = BuilderConfig(max_num_seqs=3, max_num_batched_tokens=TOKENS, num_speculative_tokens=2)
        self.model = ServedModel(LAYERS, num_blocks=BLOCKS, max_model_len=LENGTH, config=config)
        self.names = 0

    @initialize(data=st.data())
    def start(self, data: Any) -> None:
        self.add(data)
        self.add(data)
        self.step(data)

    @precondition(lambda self: len(self.model.requests) < 3)
    @rule(data=st.data())
    def add(self, data: Any) -> None:
        prefix = None
        if self.model.requests and data.draw(st.booleans()):
            other = data.draw(st.sampled_from(sorted(self.model.requests)))
            request = self.model.requests[other]
            shared = request.computed // 16 * 16
            if shared and not any(0 in blocks for blocks in request.blocks):
                prefix = other, shared
        self.names += 1
        self.model.add(f"r{self.names}", prefix=prefix)

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        self.model.remove(data.draw(st.sampled_from(sorted(self.model.requests))))

    @precondition(lambda self: self.model.requests)
    @rule(data=st.data(), count=st.integers(1, 3))
    def steps(self, data: Any, count: int) -> None:
        for _ in range(count):
            self.step(data)

    def step(self, data: Any) -> None:
        left, scheduled, accepted = TOKENS, {}, {}
        for name in self.model.batches.req_ids:
            most = min(left, LENGTH - self.model.requests[name].computed)
            scheduled[name] = data.draw(
                st.integers(0, min(most, 24)) | st.just(min(most, 1)) | st.just(min(most, 11))
            )
            accepted[name] = data.draw(st.integers(0, scheduled[name]) | st.just(scheduled[name]))
            left -= scheduled[name]
        tokens = sum(scheduled.values())
        self.model.begin(**scheduled)
        for name in LAYERS:
            drawn = self.model.draw(name, scheduled)
            for wrong in data.draw(st.lists(ONE, max_size=2)):
                argument = data.draw(st.sampled_from(["query", "key", "value", "output", "output_lse"]))
                given = {"query": drawn.query, "key": drawn.key, "value": drawn.value, argument: WRONG[wrong]}
                with pytest.raises(BatchError, match=f"{argument}.*layer {name}"):
                    self.model.runtime.forward(name, **given)
            if tokens:
                with pytest.raises(BatchError, match="key"):
                    self.model.runtime.forward(name, drawn.query)
                with pytest.raises(BatchError, match="query"):
                    self.model.runtime.forward(name, drawn.query[:-1], drawn.key, drawn.value)
            self.model.check(name, drawn)
        self.model.finish(accepted, **scheduled)

    @rule(data=st.data())
    def attack_the_next_step(self, data: Any) -> None:
        """Batches of others and damaged ones; no step is active after a refusal, and nothing is counted."""
        model, runtime = self.model, self.model.runtime
        before = state(model.batches), state(runtime.block_pool)
        other = StepBatchBuilder(
            max_num_seqs=3, max_num_batched_tokens=TOKENS, max_model_len=LENGTH, block_sizes=[16, 16]
        )
        other.add_request("x", [[1, 2, 3], [BLOCKS + data.draw(st.integers(0, 2**30)), 2, 3]])
        past_the_pool = other.step(data.draw(st.integers(1, 40)))
        narrow = StepBatchBuilder(
            max_num_seqs=3, max_num_batched_tokens=TOKENS, max_model_len=LENGTH, block_sizes=[16]
        )
        narrow.add_request("x", [[1, 2, 3]])
        batches = [past_the_pool, narrow.step(3), WRONG[data.draw(ONE)]]
        batches.append(dataclasses.replace(past_the_pool, block_tables=None))
        batches.append(
            dataclasses.replace(past_the_pool, slot_mappings=past_the_pool.slot_mappings.to("meta"))
        )
        for batch in batches:
            with pytest.raises(BatchError):
                runtime.begin_step(batch)
            for name in LAYERS:
                with pytest.raises(BatchError, match="has no step"):
                    runtime.forward(name, torch.zeros(40, 4, 8))
        np.testing.assert_equal((state(model.batches), state(runtime.block_pool)), before)

    @rule(number=ONE, index=st.integers(-3, 5))
    def attack_the_objects(self, number: int, index: int) -> None:
        model, runtime, wrong = self.model, self.model.runtime, WRONG[number]
        before = state(model.batches), state(runtime.block_pool)
        for attack in (
            lambda: runtime.block_pool.allocate(BLOCKS),
            lambda: runtime.block_pool.free([1] * 9),
            lambda: runtime.block_pool.share([BLOCKS]),
            lambda: runtime.begin_step(),
            lambda: runtime.begin_step(None, wrong),
            lambda: runtime.forward(wrong, torch.zeros(1, 4, 8)),
            lambda: runtime.forward("nobody", torch.zeros(1, 4, 8)),
            lambda: runtime.step_batch_builder(wrong),
            lambda: model.batches.add_request("y", [[1], [BLOCKS]]),
            lambda: model.batches.step(TOKENS + 1 if model.requests else {"nobody": 1}),
        ):
            with pytest.raises(BatchError):
                attack()
        np.testing.assert_equal((state(model.batches), state(runtime.block_pool)), before)
        if not 0 <= index < 2 and model.requests:
            batch = model.batches.step(0)
            with pytest.raises(BatchError, match="draft_index"):
                runtime.begin_step(batch, draft_index=index)
            model.batches.finish_step()

    def teardown(self) -> None:
        for name in list(self.model.requests):
            self.model.remove(name)
        assert self.model.runtime.block_pool.num_free == BLOCKS - 1
        self.model.runtime.close()


def test_every_step_between_attacks_equals_the_oracle():
    run_state_machine_as_test(RuntimeMachine, settings=settings(max_examples=20, stateful_step_count=15))


@pytest.mark.slow
@pytest.mark.rare
def test_every_step_between_attacks_equals_the_oracle_for_longer():
    run_state_machine_as_test(RuntimeMachine, settings=settings(max_examples=80, stateful_step_count=30))
