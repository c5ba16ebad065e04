"""Integers of any type are computed with exactly, or refused by name: none wraps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnplug.core.batch import (
    compute_causal_conv1d_metadata,
    compute_slot_mapping,
    get_dcp_local_seq_lens,
    split_prefill_chunks,
)
from attnplug.core.batch.host import exact_integers
from attnplug.core.errors import BatchError
from attnplug.ops import Reach, slots_of_keys

NARROW = [np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16]


def test_starts_that_decrease_are_refused_in_every_type():
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        with pytest.raises(BatchError, match="query_start_loc=-5 is the length of request 1"):
            compute_causal_conv1d_metadata(torch.tensor([0, 10, 5], dtype=dtype))
    # The differences of these wrap to numbers above 0.
    with pytest.raises(BatchError, match="query_start_loc=-4294967295 "):
        compute_causal_conv1d_metadata(torch.tensor([0, 2**31 - 1, -(2**31), 5], dtype=torch.int32))


def test_narrow_starts_have_the_lengths_of_wide_ones():
    starts = [0, 100, 200, 250]
    found, *_ = compute_causal_conv1d_metadata(torch.tensor(starts, dtype=torch.uint8))
    expected, *_ = compute_causal_conv1d_metadata(torch.tensor(starts))
    assert found[8]["nums"].tolist() == expected[8]["nums"].tolist() == [13, 13, 7]


@pytest.mark.parametrize("dtype", NARROW)
def test_the_reach_of_narrow_positions(dtype):
    positions, zeros, ends = (np.array(each, dtype=dtype) for each in ([0, 1, 100], [0, 0, 0], [120] * 3))
    low, high = Reach(3, 0, 0).bounds(positions, zeros, ends)
    assert (low.tolist(), high.tolist()) == ([0, 0, 97], [1, 2, 101])
    low, high = Reach(-1, 100, 0).bounds(positions, zeros, ends)
    assert (low.tolist(), high.tolist()) == ([0, 0, 0], [101, 102, 120])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("side", [2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**62, 2**63 - 1])
def test_sides_of_any_size(dtype, side):
    positions = np.array([0, 5, 2**31 - 2], dtype=dtype)
    first, end = np.zeros(3, dtype=dtype), np.full(3, 2**31 - 1, dtype=dtype)
    low, high = Reach(side, side, 0).bounds(positions, first, end)
    assert low.tolist() == [max(0, int(each) - side) for each in positions]
    assert high.tolist() == [min(2**31 - 1, int(each) + side + 1) for each in positions]


def test_numbers_past_int64_are_refused():
    with pytest.raises(BatchError, match="x=18446744073709551615 must be at most"):
        exact_integers("x", np.array([2**64 - 1], dtype=np.uint64))
    with pytest.raises(BatchError, match="right="):
        Reach(-1, 2**63, 0)
    with pytest.raises(BatchError, match="seq_lens_cpu"):
        split_prefill_chunks(np.array([2**64 - 1], dtype=np.uint64), 10)


def test_ranks_count_lengths_of_32_bits_alone():
    with pytest.raises(BatchError, match="seq_lens=4294967301 must be at most 2147483647"):
        get_dcp_local_seq_lens(torch.tensor([2**32 + 5]), 2)
    for interleave in (2**30, 2**31, 2**40, 2**62):
        found = get_dcp_local_seq_lens(torch.tensor([7, 2**30 + 3]), 4, None, interleave)
        expected = [[7, 0, 0, 0], [min(interleave, 2**30 + 3), max(0, 2**30 + 3 - interleave), 0, 0]]
        assert (found.dtype, found.tolist()) == (torch.int32, expected)


def test_slots_past_int64_are_refused():
    table, zero, one = np.array([[1, 2]]), np.array([0]), np.array([1])
    with pytest.raises(BatchError, match="block_table=1 must be at most 0"):
        compute_slot_mapping(table, zero, one, 2**62)
    assert compute_slot_mapping(table, zero, one, 2**60).tolist() == [2**60]
    keys, requests = torch.tensor([[2]]), torch.tensor([0])
    with pytest.raises(BatchError, match="block_size"):
        slots_of_keys(keys, requests, torch.tensor([[3, 1]], dtype=torch.int32), 2**62)


def test_slots_are_written_to_elements_of_their_own():
    table, zero, two = np.array([[1, 2]]), np.array([0]), np.array([2])
    frozen = np.zeros(2, dtype=np.int64)
    frozen.flags.writeable = False
    for wrong in (frozen, np.lib.stride_tricks.as_strided(np.zeros(1, dtype=np.int64), (2,), (0,))):
        with pytest.raises(BatchError, match="out="):
            compute_slot_mapping(table, zero, two, 4, out=wrong)
    tensors = [torch.from_numpy(each) for each in (table, zero, two)]
    with pytest.raises(BatchError, match="out="):
        compute_slot_mapping(*tensors, 4, out=torch.zeros(1, dtype=torch.int64).expand(2))
    with pytest.raises(BatchError, match="num_tokens"):
        compute_slot_mapping(table, zero, two, 4, num_tokens=2**62)
    with pytest.raises(BatchError, match="num_tokens"):
        compute_slot_mapping(None, zero, np.array([2**62]), 4)
