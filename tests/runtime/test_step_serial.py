"""A batch is of one step: begin_step and forward refuse it once requests moved, or another step was made."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from graph_models import served as graph_model
from graph_models import state_of
from model_layers import layer
from served_model import ServedModel

from attnplug.core.errors import BatchError
from attnplug.runtime import StepBatch
from attnplug.runtime.steps.attention_groups import build_attn_metadata

FULL = layer(dtype="float32")
SLIDING = layer(dtype="float32", sliding_window=20)
Change = Callable[[ServedModel], object]


def running() -> ServedModel:
    model = ServedModel({"0": FULL, "1": SLIDING})
    for name in ("r", "s", "t"):
        model.add(name)
    model.step(r=37, s=7, t=9)
    return model


def step(model: ServedModel) -> StepBatch:
    return model.begin(r=1, s=2, t=1)


def replaced(model: ServedModel) -> None:
    model.remove("s")
    model.add("s")


CHANGES: dict[str, tuple[Change, str]] = {
    "swap": (lambda model: model.batches.swap_states(0, 1), "swap_states"),
    "remove the last": (lambda model: model.remove("t"), "remove_request"),
    "remove the first": (lambda model: model.remove("r"), "remove_request"),
    "another of the same name": (replaced, "remove_request"),
    "another step": (lambda model: model.batches.step(1), "step"),
    "two other steps": (lambda model: [model.batches.step(1), model.batches.step(1)], "step"),
    "freed pages": (lambda model: model.batches.free_blocks("r", 1, 1), "free_blocks"),
}


@pytest.mark.parametrize(("change", "call"), CHANGES.values(), ids=CHANGES)
def test_a_change_of_the_requests_ends_a_batch(change: Change, call: str) -> None:
    for is_begun in (False, True):
        model = running()
        batch = step(model)
        drawn = model.draw("0", {"r": 1, "s": 2, "t": 1})
        if not is_begun:
            model.runtime.end_step()
        change(model)
        message = (
            rf"batch.step=\d+ is out of date: {call} was called after it was made; make a batch by step\(\)"
        )
        with pytest.raises(BatchError, match=message):
            model.run("0", drawn) if is_begun else model.runtime.begin_step(batch)
        with pytest.raises(BatchError, match="out of date"):
            build_attn_metadata(model.runtime.attention_groups, batch, model.runtime.kv_cache_config)


def test_changes_that_move_no_request_keep_a_batch() -> None:
    model = running()
    batch = step(model)
    model.add("u")
    model.batches.append_blocks("u", [model.runtime.block_pool.allocate(1) for _ in model.groups])
    drawn = {name: model.draw(name, {"r": 1, "s": 2, "t": 1}) for name in ("0", "1")}
    model.runtime.begin_step(batch)
    for name, each in drawn.items():
        model.check(name, each)
    model.finish(r=1, s=2, t=1)
    model.step(r=1, s=1, t=1, u=1)


def test_metadata_of_another_step() -> None:
    model = running()
    old = build_attn_metadata(model.runtime.attention_groups, step(model), model.runtime.kv_cache_config)
    batch = model.batches.step(1)
    with pytest.raises(
        BatchError, match=r"metadata.step=3 is not that of the batch, 4; build it for this batch"
    ):
        model.runtime.begin_step(batch, metadata=old)
    new = build_attn_metadata(model.runtime.attention_groups, batch, model.runtime.kv_cache_config)
    model.runtime.begin_step(batch, metadata=new)


def test_a_step_in_the_buffers_of_a_graph_ends_when_they_are_filled_again() -> None:
    model = graph_model()
    state = state_of(model)
    for name in ("a", "b"):
        model.add(name)
    model.step(a=9, b=4)
    one, two = state.get_graph_input_buffers(2), state.get_graph_input_buffers(4)
    first = state.prepare_graph_input_buffers(one, model.begin(a=1, b=1))
    batch = model.batches.step(1)
    with pytest.raises(BatchError, match="out of date: step was called"):
        model.runtime.begin_step(first)
    second = state.prepare_graph_input_buffers(one, batch)
    state.prepare_graph_input_buffers(two, batch)
    with pytest.raises(BatchError, match="out of date: prepare_graph_input_buffers was called"):
        model.runtime.begin_step(second)
    model.batches.swap_states(0, 1)
    with pytest.raises(BatchError, match="out of date: swap_states was called"):
        state.prepare_graph_input_buffers(two, batch)
