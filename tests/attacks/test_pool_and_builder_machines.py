"""Random calls to a pool and a step builder, good and hostile: a model says what each must answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from test_step_batch_model import StepBatchModel
from test_wrong_types import CALLS, WRONG, state

from attnplug.core.errors import BatchError
from attnplug.runtime import BlockPool

pytestmark = pytest.mark.attack("numbers")
BLOCKS = 7
SOME_BLOCKS = st.lists(st.integers(-2, BLOCKS + 1), max_size=6)


class PoolMachine(RuleBasedStateMachine):
    """Users of each block in a Counter, and the order in which unused blocks are given out."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.users: Counter[int] = Counter()
        self.queue = list(range(1, BLOCKS))

    @rule(count=st.integers(-2, BLOCKS + 1))
    def allocate(self, count: int) -> None:
        if not 0 <= count <= len(self.queue):
            with pytest.raises(BatchError, match="count="):
                self.pool.allocate(count)
            return
        expected, self.queue = self.queue[:count], self.queue[count:]
        assert self.pool.allocate(count) == expected
        self.users.update(expected)

    @rule(blocks=SOME_BLOCKS)
    def share(self, blocks: list[int]) -> None:
        if any(not 0 <= block < BLOCKS for block in blocks):
            with pytest.raises(BatchError, match="blocks="):
                self.pool.share(blocks)
            return
        self.pool.share(blocks)
        self.users.update(block for block in blocks if block)
        self.queue = [block for block in self.queue if block not in blocks]

    @rule(blocks=SOME_BLOCKS)
    def free(self, blocks: list[int]) -> None:
        given = Counter(block for block in blocks if block)
        if any(not 0 <= block < BLOCKS for block in blocks) or any(
            self.users[block] < times for block, times in given.items()
        ):
            with pytest.raises(BatchError, match="blocks="):
                self.pool.free(blocks)
            return
        self.pool.free(blocks)
        for block in blocks:
            self.users[block] -= 1
            if block and not self.users[block]:
                self.queue.append(block)

    @rule(call=st.sampled_from(["allocate", "share", "free", "users"]), wrong=st.integers(0, len(WRONG) - 1))
    def attack(self, call: str, wrong: int) -> None:
        with pytest.raises(BatchError):
            getattr(self.pool, call)(WRONG[wrong])

    @invariant()
    def users_and_queue_agree(self) -> None:
        assert [self.pool.users(block) for block in range(1, BLOCKS)] == [
            self.users[block] for block in range(1, BLOCKS)
        ]
        assert list(self.pool._free) == self.queue
        assert self.pool.num_free == len(self.queue)


ON_ANY_BUILDER = [
    call
    for call, (make, _) in CALLS.items()
    # The others make an object, or need a request "a" or "b".
    if make.__name__ in ("builder", "stepped", "finished")
    and not call.startswith("StepBatchBuilder")
    and call not in ("add_request(computed)", "add_request(encoder_len)")
]


class AttackedBuilder(StepBatchModel):
    """The model of tests/runtime, between hostile calls that must change nothing."""

    @rule(call=st.sampled_from(ON_ANY_BUILDER), wrong=st.integers(0, len(WRONG) - 1))
    def attack(self, call: str, wrong: int) -> None:
        before = state(self.builder)
        with pytest.raises(BatchError):
            CALLS[call][1](self.builder, WRONG[wrong])
        np.testing.assert_equal(state(self.builder), before)

    @rule(data=st.data())
    def attack_a_request(self, data: Any) -> None:
        if not self.requests:
            return
        builder, name = self.builder, data.draw(st.sampled_from(self.requests)).name
        groups, width = len(self.sizes), builder._requests.tables.shape[2]
        before = state(builder)
        for attack in (
            lambda: builder.add_request(name),
            lambda: builder.append_blocks(name, [[1]] * (groups - 1) + [[-1]]),
            lambda: builder.append_blocks(name, [[1]] * (groups - 1) + [[1] * (width + 1)]),
            lambda: builder.append_blocks(name, [[1]] * (groups + 1)),
            lambda: builder.free_blocks(name, 0, width + 1),
            lambda: builder.free_blocks(name, groups, 0),
            lambda: builder.step({name: 1, "nobody": 1}),
            lambda: builder.step({name: builder.max_model_len + 1}),
            lambda: builder.step({name: 1}, {name: 2}),
            lambda: builder.step([1] * (builder.num_reqs + 1)),
            lambda: builder.finish_step({name: 99}),
            lambda: builder.rollback({name: builder.max_model_len + 1}),
            lambda: builder.swap_states(0, builder.num_reqs),
            lambda: builder.profile_step(1, 1),
        ):
            with pytest.raises(BatchError):
                attack()
        np.testing.assert_equal(state(builder), before)


@pytest.mark.parametrize("machine", [PoolMachine, AttackedBuilder])
def test_what_is_refused_changes_nothing_and_the_rest_is_as_in_the_model(machine):
    run_state_machine_as_test(machine, settings=settings(max_examples=40, stateful_step_count=30))


@pytest.mark.slow
@pytest.mark.rare
@pytest.mark.parametrize(("machine", "examples"), [(PoolMachine, 1500), (AttackedBuilder, 500)])
def test_what_is_refused_changes_nothing_for_longer(machine, examples):
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=60))
