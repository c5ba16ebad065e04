"""Slots computed on a device are those that the host computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.core.batch import compute_slot_mapping as on_host
from attnplug.core.errors import BatchError
from attnplug.ops import triton as kernels


def batch(new, computed, width, seed=0):
    """Tables, start locations and positions of requests; entries past a request's pages are garbage."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(1, 2**20, (len(new), width), generator=generator, dtype=torch.int32)
    loc = torch.tensor([0, *new]).cumsum(0, dtype=torch.int32)
    positions = [torch.arange(c, c + n) for c, n in zip(computed, new, strict=True)]
    return table, loc, torch.cat(positions)


@settings(max_examples=40)
@given(
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=9),
    block_size=st.sampled_from([1, 3, 16]),
    padding=st.integers(0, 5),
    starts=st.booleans(),
)
def test_slots_are_those_of_the_host(device, requests, block_size, padding, starts):
    new, computed = zip(*requests, strict=True)
    table, loc, positions = batch(new, computed, 49)
    start_idx = torch.tensor([c + n // 2 for n, c in requests]) if starts else None
    out = torch.full((len(positions) + padding,), 77, device=device)
    found = kernels.compute_slot_mapping(
        table.to(device),
        loc.to(device),
        positions.to(device),
        block_size,
        out=out,
        start_idx=None if start_idx is None else start_idx.to(device),
    )
    assert found is out
    counts = torch.tensor(computed), torch.tensor(new)
    expected = on_host(table, *counts, block_size, num_tokens=len(out), start_idx=start_idx)
    assert torch.equal(out.cpu(), expected)


def test_long_batches_take_more_than_one_program(device):
    new, computed = [1, 700, 0, 0, 3, 290], [50, 0, 7, 0, 90, 11]
    table, loc, positions = batch(new, computed, 64)
    out = torch.empty(1100, dtype=torch.int64, device=device)
    kernels.compute_slot_mapping(table.to(device), loc.to(device), positions.to(device), 16, out=out)
    expected = on_host(table, torch.tensor(computed), torch.tensor(new), 16, num_tokens=1100)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_inputs_have_any_integer_type_and_any_strides(device, dtype):
    table, loc, positions = batch([3, 2], [5, 0], 4)

    def spread(tensor):
        return torch.stack([tensor.to(dtype)] * 2, -1).to(device)[..., 0]

    out = torch.full((20,), 77, device=device)
    start_idx = spread(torch.tensor([6, 0]))
    kernels.compute_slot_mapping(
        spread(table.T).T, spread(loc), spread(positions), 4, out=out[::2], start_idx=start_idx
    )
    counts = torch.tensor([5, 0]), torch.tensor([3, 2])
    expected = on_host(table, *counts, 4, num_tokens=10, start_idx=torch.tensor([6, 0]))
    assert torch.equal(out[::2].cpu(), expected)
    assert (out[1::2] == 77).all()


def test_slots_past_2_to_the_31_are_right(device):
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32, device=device)
    loc = torch.tensor([0, 1], dtype=torch.int32, device=device)
    out = torch.empty(1, dtype=torch.int64, device=device)
    kernels.compute_slot_mapping(table, loc, torch.tensor([7], device=device), 256, out=out)
    assert out.item() == (2**31 - 1) * 256 + 7


def test_positions_outside_their_table_have_no_slot(device):
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=device)
    loc = torch.tensor([0, 3, 4], dtype=torch.int32, device=device)
    positions = torch.tensor([-1, 7, 8, 2**40], device=device)
    out = torch.empty(4, dtype=torch.int64, device=device)
    kernels.compute_slot_mapping(table, loc, positions, 4, out=out)
    assert out.tolist() == [-1, 11, -1, -1]


@pytest.mark.parametrize(("requests", "width"), [(0, 4), (2, 0)])
def test_without_tables_there_are_no_slots(device, requests, width):
    table = torch.empty(requests, width, dtype=torch.int32, device=device)
    loc = torch.arange(requests + 1, device=device)
    out = torch.empty(5, dtype=torch.int64, device=device)
    kernels.compute_slot_mapping(table, loc, torch.zeros(2, dtype=torch.int64, device=device), 4, out=out)
    assert out.tolist() == [-1] * 5


def test_an_empty_target_stays_empty(device):
    table, loc, positions = (part.to(device) for part in batch([0], [4], 2))
    out = torch.empty(0, dtype=torch.int64, device=device)
    assert kernels.compute_slot_mapping(table, loc, positions, 4, out=out) is out


BAD = [
    ({"block_size": 0}, "block_size=0 must be an integer of at least 1"),
    ({"block_table": torch.zeros(2)}, r"block_table=\(2,\) must be of shape \(requests, max_blocks\)"),
    (
        {"query_start_loc": torch.zeros(2)},
        r"query_start_loc=\(2,\) must be of shape \(3,\): block_table has 2",
    ),
    ({"start_idx": torch.zeros(3)}, r"start_idx=\(3,\) must be of shape \(2,\): block_table has 2 requests"),
    ({"positions": torch.zeros(4, 1)}, r"positions=\(4, 1\) must have one dimension"),
    ({"out": torch.zeros(3, dtype=torch.int64)}, r"out='torch.int64 \(3,\)' must be int64 with at least 4"),
    ({"out": torch.zeros(4, dtype=torch.int32)}, r"out='torch.int32 \(4,\)' must be int64 with at least 4"),
]


@pytest.mark.parametrize(("change", "said"), BAD)
def test_arguments_that_do_not_fit_are_refused(device, change, said):
    table, loc, positions = batch([3, 1], [0, 5], 4)
    given = {"block_table": table, "query_start_loc": loc, "positions": positions, "block_size": 4}
    given["out"] = torch.empty(4, dtype=torch.int64)
    with pytest.raises(BatchError, match=said):
        kernels.compute_slot_mapping(**given | change)


@pytest.mark.gpu
def test_on_a_gpu_nothing_waits_and_nothing_is_allocated(sync_errors):
    table, loc, positions = (part.cuda() for part in batch([3, 1], [0, 5], 4))
    out = torch.empty(6, dtype=torch.int64, device="cuda")
    kernels.compute_slot_mapping(table, loc, positions, 4, out=out)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with sync_errors():
        kernels.compute_slot_mapping(table, loc, positions, 4, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
