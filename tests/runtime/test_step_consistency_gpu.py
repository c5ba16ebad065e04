"""On a GPU: a step that contradicts itself is refused, or told of as soon as the device has compared it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from model_layers import layer
from served_model import ServedModel

from attnplug.core.errors import BatchError
from attnplug.runtime import StepBatch

pytestmark = pytest.mark.gpu

SPECS = {
    "0": layer(head_size=16, dtype="float32"),
    "1": layer(head_size=16, dtype="float32", causal=False),
}


def begun() -> tuple[ServedModel, StepBatch]:
    model = ServedModel(SPECS, device="cuda", debug=False, backend="TRITON")
    for name in ("r", "s"):
        model.add(name)
    model.step(r=20, s=9)
    batch = model.begin(r=3, s=7)
    model.runtime.end_step()
    return model, batch


@pytest.mark.parametrize("field", ["seq_lens", "query_start_loc"])
@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "replaced"])
def test_a_tensor_that_differs_from_its_copy_on_the_host_is_told_of_without_a_wait(
    field: str, in_place: bool, sync_errors: Callable[[], AbstractContextManager[None]]
) -> None:
    model, batch = begun()
    model.runtime.begin_step(batch)
    torch.cuda.synchronize()
    tensor = getattr(batch.common, field)
    if in_place:
        tensor[1] -= 1
    else:
        other = tensor.clone()
        other[1] -= 1
        batch = dataclasses.replace(batch, common=dataclasses.replace(batch.common, **{field: other}))
    with sync_errors():
        model.runtime.begin_step(batch)
    torch.cuda.synchronize()
    with pytest.raises(BatchError, match=rf"batch.common.{field}='on the device' differs from its copy"):
        model.run("0", model.draw("0", {"r": 3, "s": 7}))


def test_contradictions_on_the_host_are_refused_at_once() -> None:
    model, batch = begun()
    zeros = torch.zeros(3, dtype=torch.int32)
    for fields, message in (
        ({"num_reqs": 1}, r"query_start_loc=\(3,\) must be of shape \[2\]"),
        ({"query_start_loc_cpu": zeros}, "max_query_len=7 must be 0"),
        ({"block_table_tensor": batch.common.block_table_tensor[0]}, "must be of shape"),
    ):
        common = dataclasses.replace(batch.common, **fields)  # type: ignore[arg-type]
        with pytest.raises(BatchError, match=message):
            model.runtime.begin_step(dataclasses.replace(batch, common=common))


def test_a_step_as_it_was_made_is_not_compared() -> None:
    model, batch = begun()
    model.runtime.begin_step(batch)
    assert not model.runtime._active._comparison._pending
    for name in SPECS:
        model.check(name, model.draw(name, {"r": 3, "s": 7}))


def test_swapped_requests_end_a_step_as_on_a_cpu() -> None:
    model, batch = begun()
    model.batches.swap_states(0, 1)
    with pytest.raises(BatchError, match="out of date: swap_states was called"):
        model.runtime.begin_step(batch)
