"""An interrupt at any line of any call leaves requests, blocks and steps as before the call, or as after it."""

from __future__ import annotations

import re
import signal
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from interrupting import Interrupt, at_each_line, run_to_line
from tables_on_device import keep_tables_on_device

import attnplug
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.core.errors import BatchError
from attnplug.registry import Registry, hookimpl
from attnplug.runtime import AttentionRuntime, BlockPool, GraphState, StepBatchBuilder

SPEC = LayerSpec(num_heads=1, num_kv_heads=1, head_size=16, dtype="float32")
WINDOW = SPEC.replace(window=(3, 0))
NAMES = ("a", "b", "c", "d")


def pool_state(pool: BlockPool) -> Any:
    free = pool.num_free
    return [pool.users(block) for block in range(pool.num_blocks)], list(pool._free), free


def state(made: StepBatchBuilder) -> Any:
    """All that later calls depend on, by request."""
    names = list(made.req_ids)
    rows: dict[str, Any] = {}
    for row, name in enumerate(names):
        held = made._requests.num_blocks[:, row].tolist()
        tables = [made._requests.tables[group, row, :count].tolist() for group, count in enumerate(held)]
        rows[name] = [made._requests.numbers[:, row].tolist(), tables, made._requests.placeholders.get(name)]
        assert made._requests.row_of(name) == row
    counts = made._requests.holders._counts.copy()
    for group in range(counts.shape[0]):
        live = [block for row in rows.values() for block in row[1][group] if block]
        assert counts[group].tolist() == np.bincount(live, minlength=counts.shape[1]).tolist()
    return names, rows, made._requests.stepped, made._requests.members.order


# The pool


def used_pool() -> BlockPool:
    pool = BlockPool(12)
    pool.allocate(4)
    pool.share([2, 3, 9])
    pool.free([1])
    return pool


POOL_CALLS: dict[str, Callable[[BlockPool], object]] = {
    "allocate": lambda pool: pool.allocate(3),
    "allocate one": lambda pool: pool.allocate(1),
    "allocate all": lambda pool: pool.allocate(pool.num_free),
    "share": lambda pool: pool.share([2, 5, 0, 2]),
    "free": lambda pool: pool.free([2, 9, 3]),
    "free twice": lambda pool: pool.free([2, 9, 2, 0]),
    "num_free": lambda pool: pool.num_free,
    "users": lambda pool: pool.users(2),
}


@pytest.mark.parametrize("pending", [False, True], ids=["settled", "after a call"])
@pytest.mark.parametrize("call", POOL_CALLS)
def test_an_interrupted_call_of_a_pool_has_changed_nothing_and_can_be_made_again(call, pending):
    before, after = used_pool(), used_pool()
    POOL_CALLS[call](after)
    expected = pool_state(before), pool_state(after)

    def make() -> BlockPool:
        pool = used_pool()
        if not pending:
            assert pool.num_free == 7
        return pool

    def check(pool: BlockPool) -> None:
        found.append(pool_state(pool))
        if found[-1] == expected[0]:
            POOL_CALLS[call](pool)
            assert pool_state(pool) == expected[1]

    found: list[Any] = []
    lines = at_each_line(make, POOL_CALLS[call], check)
    # Nobody owns blocks that `allocate` took and did not return, so no interrupted call may have taken any.
    assert found[:lines] == [expected[0]] * lines
    assert found[lines] == expected[1]


def test_no_block_is_lost_or_given_twice_between_interrupts_at_random_lines():
    drawn = np.random.default_rng(0)
    pool, held = BlockPool(9), []
    for _ in range(300):
        if held and drawn.random() < 0.5:
            block = held[int(drawn.integers(len(held)))]
            users = pool.users(block)
            run_to_line(lambda block=block: pool.free([block]), int(drawn.integers(1, 40)))
            if pool.users(block) < users:
                held.remove(block)
        else:
            given: list[int] = []
            run_to_line(lambda given=given: given.extend(pool.allocate(1)), int(drawn.integers(1, 30)))
            held += given
        assert sorted(held) == sorted(set(held))
        assert pool.num_free == 8 - len(held)
        if len(held) == 8:
            pool.free([held.pop()])


# Requests


def builder(*, on_device: bool = False, **changes: Any) -> StepBatchBuilder:
    sizes: dict[str, Any] = {
        "max_num_seqs": 6,
        "max_num_batched_tokens": 32,
        "max_model_len": 32,
        "block_sizes": [4, 4, 2],
        "cross_groups": [2],
        "max_encoder_len": 6,
        "num_blocks": 200,
        "reorder_batch_thresholds": [1],
        "one_pool": True,
    }
    made = StepBatchBuilder(**sizes | changes)
    if on_device:
        keep_tables_on_device(made, 3)
    return made


def filled(**changes: Any) -> StepBatchBuilder:
    """Four requests; the last step is not finished."""
    made = builder(**changes)
    for row, name in enumerate(NAMES):
        first = 1 + 40 * row
        pages = [list(range(first, first + 5)), list(range(first + 10, first + 15)), [first + 20, first + 21]]
        items = {"image": [(9, 3)]} if name in "bd" else None
        made.add_request(name, pages, 8 + row, encoder_len=3, placeholders=items)
    made.step([1, 4, 1, 3])
    return made


def finished(**changes: Any) -> StepBatchBuilder:
    made = filled(**changes)
    made.finish_step()
    return made


NEW = [[190], [191, 192], [193]]
CALLS: dict[str, tuple[Callable[..., StepBatchBuilder], Callable[[StepBatchBuilder], object]]] = {
    "add": (filled, lambda made: made.add_request("e", NEW, 2, 1)),
    "add, with items": (filled, lambda made: made.add_request("e", NEW, 2, 0, {"image": [(1, 1)]})),
    "add, with null pages": (
        filled,
        lambda made: made.add_request("e", [[0, 0, 190], [191, 192, 194], [193]], 8),
    ),
    "add, without pages": (filled, lambda made: made.add_request("e")),
    "add, sharing a prefix": (
        filled,
        lambda made: made.add_request("e", [[1, 2, 190], [11, 12, 191], []], 8),
    ),
    "append": (filled, lambda made: made.append_blocks("b", NEW)),
    "append, to the last": (filled, lambda made: made.append_blocks("d", [[], [190], []])),
    "free": (finished, lambda made: made.free_blocks("c", 1, 2)),
    "remove the first": (filled, lambda made: made.remove_request("a")),
    "remove one with items": (filled, lambda made: made.remove_request("b")),
    "remove the last": (filled, lambda made: made.remove_request(made.req_ids[-1])),
    "swap": (filled, lambda made: made.swap_states(0, 2)),
    "swap with itself": (filled, lambda made: made.swap_states(1, 1)),
    "finish": (filled, lambda made: made.finish_step()),
    "finish a part": (filled, lambda made: made.finish_step({"b": 2, "a": 0, "c": 1, "d": 0})),
    "rollback": (finished, lambda made: made.rollback({"a": 0, "b": 3, "c": 0, "d": 1})),
    "step": (finished, lambda made: made.step(1)),
    "step, in another order": (finished, lambda made: made.step({"a": 3, "c": 2, "b": 1, "d": 1}, 1)),
    "step, made again": (filled, lambda made: made.step([3, 1, 2, 1])),
    "profile": (builder, lambda made: made.profile_step(2, 9)),
    "num_reqs": (filled, lambda made: made.num_reqs),
    "num_computed_tokens_cpu": (filled, lambda made: made.num_computed_tokens_cpu),
}
COUNTS_AS_MADE = ("step", "step, in another order", "step, made again")


def next_step(made: StepBatchBuilder) -> Any:
    """The tables and slots of a step of one token for each request, and their placeholders, by request."""
    if made._requests.stepped is not None:
        made.finish_step(0)
    # One request of these tests has no room for a token.
    batch = made.step(
        {name: int(made._requests.capacity[made._requests.row_of(name)] > 11) for name in made.req_ids}
    )
    found = {}
    for row, name in enumerate(batch.req_ids):
        at = batch.common.query_start_loc_cpu[row : row + 2].tolist()
        own = [int(batch.common.seq_lens[row])]
        for group in range(2):
            table, slots = batch.of_group(group)
            width = -(-own[0] // 4)
            own += [table[row, :width].tolist(), slots[at[0] : at[1]].tolist()]
        found[name] = own
    return found, {name: len(items.items) for name, items in batch.placeholders.items()}


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device tables"])
@pytest.mark.parametrize("call", CALLS)
def test_an_interrupted_call_of_a_builder_is_as_before_or_as_after(call, on_device):
    make, run = CALLS[call]
    before, after = make(on_device=on_device), make(on_device=on_device)
    run(after)
    states = [state(before), state(after)]
    if not before.req_ids:
        steps: list[Any] = [None, None]
    else:
        steps = [next_step(before), next_step(after)]

    def check(made: StepBatchBuilder) -> None:
        found = state(made)
        assert found in states
        found_states.append(found)
        if made.req_ids:
            # The numbers of the next step are right, and so are those after the call is made again.
            assert next_step(made) == steps[states.index(found)]

    found_states: list[Any] = []
    lines = at_each_line(lambda: make(on_device=on_device), run, check)
    assert found_states[-1] == states[1]
    if call not in COUNTS_AS_MADE:
        assert found_states[:lines] == [states[0]] * lines


@pytest.mark.parametrize("call", [name for name in CALLS if name not in COUNTS_AS_MADE])
def test_an_interrupted_call_of_a_builder_can_be_made_again(call):
    make, run = CALLS[call]
    after = make()
    run(after)
    expected = state(after)
    for number in range(1, 1000):
        made = make()
        # Two interrupts in a row, the second where the first left off or elsewhere.
        if not run_to_line(lambda made=made: run(made), number):
            break
        if run_to_line(lambda made=made: run(made), max(1, number // 2)):
            run(made)
        assert state(made) == expected


def test_each_change_of_the_requests_or_of_their_order_has_a_number_and_nothing_else_has():
    made = finished()
    calls: list[tuple[Callable[[], object], bool]] = [
        (lambda: made.add_request("e", NEW, 2, 1), True),
        (lambda: made.append_blocks("e", [[194], [195], []]), False),
        (lambda: made.swap_states(0, 2), True),
        (lambda: made.remove_request("c"), True),
        (lambda: made.remove_request(made.req_ids[-1]), True),
        (lambda: made.step(1), False),
        (made.finish_step, False),
        (lambda: made.rollback(1), False),
        (lambda: made.free_blocks("b", 0, 1), False),
        (lambda: made.step({name: 1 + (row == 0) for row, name in enumerate(made.req_ids)}), True),
    ]
    for number, (call, changes) in enumerate(calls):
        before = made._requests.members.order
        call()
        assert (made._requests.members.order > before) is changes, number


def test_a_real_interrupt_while_requests_come_and_go_leaves_a_builder_that_works():
    made, started = builder(), 0

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for round_ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0003 + 0.00005 * (round_ % 20))
                for _ in range(100):
                    started += 1
                    made.add_request(f"r{started}", [[], [], []], 3)
                    made.swap_states(0, made.num_reqs - 1)
                    if made.num_reqs > 4:
                        made.remove_request(made.req_ids[1])
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
            names, rows, _, _ = state(made)
            assert len(set(names)) == len(names) == len(rows)
            assert made.num_computed_tokens_cpu.tolist() == [3] * len(names)
            while made.num_reqs > 4:
                made.remove_request(made.req_ids[0])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# Steps of a runtime

# These calls run hundreds of lines: a plain run has an interrupt at some of them.
every_line = pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 11])


def runtime(**changes: Any) -> AttentionRuntime:
    plan = attnplug.plan({"full": SPEC, "window": WINDOW}, "cpu", backend="TORCH", num_blocks=32)
    config = BuilderConfig(
        max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, cudagraph_batch_sizes=(2, 4)
    )
    return AttentionRuntime(plan, config=config, **changes)


class Served:
    """A runtime in the middle of a decode, whose values are the positions of tokens."""

    def __init__(self) -> None:
        self.runtime = runtime()
        self.builder = self.runtime.step_batch_builder()
        for name in "ab":
            count = len(self.builder.block_sizes)
            self.builder.add_request(name, [self.runtime.block_pool.allocate(1) for _ in range(count)])
        self.run(self.builder.step(3), torch.arange(3.0).repeat(2))
        self.builder.finish_step()
        self.runtime.end_step()
        self.batch = self.builder.step(1)
        self.graphs = GraphState(self.runtime)

    def run(self, batch: Any, values: torch.Tensor) -> list[torch.Tensor]:
        self.runtime.begin_step(batch)
        return self.forward(values)

    def forward(self, values: torch.Tensor) -> list[torch.Tensor]:
        zeros, rows = torch.zeros(values.numel(), 1, 16), values[:, None, None].expand(-1, 1, 16)
        return [self.runtime.forward(layer, zeros, zeros, rows.contiguous()) for layer in ("full", "window")]

    def check(self) -> None:
        """The step of token 3 has the mean of 0, 1, 2, 3 in both layers."""
        for output in self.run(self.batch, torch.full((2,), 3.0)):
            assert torch.allclose(output, torch.full_like(output, 1.5))


def is_refused_or_right(served: Served, rows: int = 2) -> None:
    try:
        outputs = served.forward(torch.full((rows,), 3.0))
    except BatchError as error:
        if not re.search("has no step|closed", str(error)):
            raise
        return
    for output in outputs:
        assert torch.allclose(output[:2], torch.full_like(output[:2], 1.5))


@every_line
def test_an_interrupted_begin_step_leaves_the_old_step_or_none_or_the_new_one(every):
    def check(served: Served) -> None:
        is_refused_or_right(served)
        served.check()

    assert (
        at_each_line(Served, lambda served: served.runtime.begin_step(served.batch), check, every)
        > 50 // every
    )


@every_line
def test_an_interrupted_preparation_of_a_graph_leaves_no_step_of_half_copied_buffers(every):
    def prepare(served: Served) -> None:
        buffers = served.graphs.get_graph_input_buffers(4)
        served.graphs.prepare_graph_input_buffers(buffers, served.batch)

    def make() -> Served:
        served = Served()
        prepare(served)
        return served

    def check(served: Served) -> None:
        is_refused_or_right(served, 4)
        served.check()
        prepare(served)
        is_refused_or_right(served, 4)
        served.check()

    assert at_each_line(make, prepare, check, every) > 50 // every


@pytest.mark.parametrize("method", ["end_step", "close"])
def test_an_interrupted_end_can_be_repeated(method):
    def check(served: Served) -> None:
        is_refused_or_right(served)
        getattr(served.runtime, method)()
        with pytest.raises(BatchError):
            served.forward(torch.zeros(2))

    def make() -> Served:
        served = Served()
        served.runtime.begin_step(served.batch)
        return served

    assert at_each_line(make, lambda served: getattr(served.runtime, method)(), check) > 0


@every_line
def test_an_interrupted_forward_can_be_repeated(every):
    def make() -> Served:
        served = Served()
        served.runtime.begin_step(served.batch)
        return served

    def check(served: Served) -> None:
        is_refused_or_right(served)

    assert (
        at_each_line(make, lambda served: served.forward(torch.full((2,), 3.0)), check, every) > 20 // every
    )


# The registry


def no_backends() -> list[Any]:
    return []


def plugin() -> types.ModuleType:
    made = types.ModuleType("made_here")
    vars(made).update(ATTNPLUG_API=(1, 1), attnplug_backends=hookimpl(no_backends))
    return made


@pytest.mark.parametrize("method", ["register", "unregister"])
def test_an_interrupted_change_of_a_registry_is_made_or_not_and_does_not_lock_it(method):
    def make() -> Registry:
        made = Registry([])
        if method == "unregister":
            made.register(plugin(), "late")
        return made

    def run(made: Registry) -> None:
        made.register(plugin(), "late") if method == "register" else made.unregister("late")

    def check(made: Registry) -> None:
        names = [record.name for record in made.records]
        if names == ["late"]:
            assert made.unregister("late").name == "late"
        assert [record.name for record in made.records] == []
        made.register(plugin(), "late")
        assert [record.name for record in made.records] == ["late"]

    assert at_each_line(make, run, check) > 10
