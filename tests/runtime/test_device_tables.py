"""A device's block tables stay between steps: each sends its changes in one copy, and the other fields in one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tables_on_device import check_tables, keep_tables_on_device

from attnplug.ops.buffers import CpuGpuBuffer
from attnplug.runtime import StepBatchBuilder

GROUPS = 3


def builder(device: str = "cpu", few: int | None = None) -> StepBatchBuilder:
    made = StepBatchBuilder(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=256,
        block_sizes=[4] * GROUPS,
        device=device,
        reorder_batch_thresholds=[1],
    )
    if device == "cpu":
        keep_tables_on_device(made, few)
    for row in range(6):
        made.add_request(str(row), [list(range(1 + row, 11 + row))] * GROUPS, num_computed_tokens=30)
    return made


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of each copy to the device."""
    found: list[int] = []
    copy = CpuGpuBuffer.copy_to_gpu

    def counted(self: CpuGpuBuffer, n: int | None = None) -> Any:
        found.append(-1 if n is None else n)
        return copy(self, n)

    monkeypatch.setattr(CpuGpuBuffer, "copy_to_gpu", counted)
    return found


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_step_sends_what_changed_and_no_more(copies: list[int], device: str) -> None:
    made = builder(device)
    made.step()
    # Each entry of the tables has a place of two words with it.
    assert len(copies) == 2
    assert 3 * 6 * 10 * GROUPS in copies
    del copies[:]
    made.step()
    assert len(copies) == 1
    made.append_blocks("3", [[50]] * GROUPS)
    del copies[:]
    made.step()
    assert len(copies) == 2
    assert 3 * GROUPS in copies


@pytest.mark.parametrize("few", [0, 1000])
def test_every_change_of_the_tables_arrives(few: int) -> None:
    made = builder(few=few)
    changes = [
        lambda: made.append_blocks("2", [[90, 91], [], [92]]),
        lambda: made.swap_states(0, 5),
        lambda: made.remove_request("1"),
        lambda: made.free_blocks("4", 1, 3),
        lambda: made.add_request("new", [[70, 71], [72], [73, 74]]),
    ]
    for change in changes:
        change()
        # A request with a longer query goes to the end.
        counts = dict.fromkeys(made.req_ids, 1) | {made.req_ids[0]: 3}
        batch = made.step(counts)
        check_tables(made, batch.block_tables)
        made.finish_step()


def test_a_profile_run_sees_the_null_block_and_a_later_step_its_own() -> None:
    made = builder()
    for name in list(made.req_ids):
        made.remove_request(name)
    assert not made.profile_step(4, 20).block_tables.any()
    made.add_request("a", [[5, 6]] * GROUPS)
    batch = made.step(7)
    check_tables(made, batch.block_tables)
    assert batch.block_tables.tolist() == [[[5, 6]]] * GROUPS


def test_a_step_that_was_refused_sends_its_changes_later() -> None:
    made = builder()
    made.step()
    made.append_blocks("0", [[60]] * GROUPS)
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        made.step(40)
    batch = made.step([11, 1, 1, 1, 1, 1])
    row = batch.req_ids.index("0")
    assert np.array_equal(batch.block_tables[:, row, 10], [60] * GROUPS)
    check_tables(made, batch.block_tables)
