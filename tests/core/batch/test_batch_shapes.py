"""Speculative decodes with a dimension per request, and shares of context parallelism."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batch_strategies import unmodified
from hypothesis import given
from hypothesis import strategies as st

from attnplug.core.batch import (
    compute_causal_conv1d_metadata,
    get_dcp_local_seq_lens,
    reshape_attn_output_for_spec_decode,
    reshape_query_for_spec_decode,
)
from attnplug.core.errors import BatchError


def test_queries_are_viewed_per_request_and_outputs_put_back() -> None:
    query = torch.randn(12, 2, 4)
    shaped = reshape_query_for_spec_decode(query, 3)
    assert shaped.shape == (3, 4, 2, 4)
    assert shaped.data_ptr() == query.data_ptr()
    assert torch.equal(shaped[1], query[4:8])
    assert torch.equal(reshape_attn_output_for_spec_decode(shaped), query)
    assert reshape_attn_output_for_spec_decode(query) is query
    assert reshape_query_for_spec_decode(query[:0], 3).shape == (3, 0, 2, 4)
    assert torch.equal(
        reshape_attn_output_for_spec_decode(shaped.transpose(0, 1)), shaped.transpose(0, 1).reshape(12, 2, 4)
    )


def test_a_slice_of_a_packed_projection_is_viewed_too() -> None:
    packed = torch.randn(12, 6, 4)
    shaped = reshape_query_for_spec_decode(packed[:, :2], 3)
    assert torch.equal(shaped.flatten(0, 1), packed[:, :2])


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(BatchError, match="batch_size=5 must divide the 12 tokens"):
        reshape_query_for_spec_decode(torch.empty(12, 2, 4), 5)
    with pytest.raises(BatchError, match="batch_size=0 must be an integer of at least 1"):
        reshape_query_for_spec_decode(torch.empty(12, 2, 4), 0)
    with pytest.raises(BatchError, match=r"query=\(12, 8\) must be \[tokens, heads, head_size\]"):
        reshape_query_for_spec_decode(torch.empty(12, 8), 3)
    with pytest.raises(BatchError, match=r"attn_output=\(12, 8\) must be"):
        reshape_attn_output_for_spec_decode(torch.empty(12, 8))


@given(st.lists(st.integers(0, 200), max_size=6), st.integers(1, 6), st.integers(1, 17))
def test_a_rank_holds_the_positions_whose_run_is_its_own(
    seq_lens: list[int], size: int, interleave: int
) -> None:
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    expected = [
        [sum(position // interleave % size == rank for position in range(length)) for rank in range(size)]
        for length in seq_lens
    ]
    with unmodified(lengths):
        shares = get_dcp_local_seq_lens(lengths, size, None, interleave)
    assert shares.dtype == torch.int32
    assert shares.view(-1, size).tolist() == expected
    assert shares.view(-1, size).sum(1).tolist() == seq_lens
    for rank in range(size):
        one = get_dcp_local_seq_lens(lengths, size, rank, interleave)
        assert one.dtype == torch.int32
        assert one.tolist() == [counts[rank] for counts in expected]


def test_one_rank_holds_everything_in_one_dimension() -> None:
    assert get_dcp_local_seq_lens(torch.tensor([3, 0, 2**31 - 1])).tolist() == [3, 0, 2**31 - 1]
    assert get_dcp_local_seq_lens(torch.empty(0, dtype=torch.int64), 2).shape == (0, 2)


def test_shares_are_computed_where_the_lengths_are() -> None:
    shares = get_dcp_local_seq_lens(torch.empty(5, dtype=torch.int64, device="meta"), 4, None, 2)
    assert (shares.shape, shares.device.type) == ((5, 4), "meta")
    assert get_dcp_local_seq_lens(torch.empty(5, dtype=torch.int32, device="meta"), 4, 3).shape == (5,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "dcp_size=0 must be an integer of at least 1"),
        ((2, 2), "dcp_rank=2 must be in 0 .. 1, dcp_size being 2"),
        ((2, -1), "dcp_rank=-1 must be in 0 .. 1"),
        ((2, 0, 0), "cp_kv_cache_interleave_size=0 must be an integer of at least 1"),
    ],
)
def test_ranks_that_there_are_not_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        get_dcp_local_seq_lens(torch.tensor([5]), *arguments)


@pytest.mark.parametrize("seq_lens", [torch.tensor([[5]]), torch.tensor([5, -1])])
def test_lengths_that_mean_nothing_are_refused(seq_lens: torch.Tensor) -> None:
    with pytest.raises(BatchError, match="seq_lens="):
        get_dcp_local_seq_lens(seq_lens, 2)


@pytest.mark.parametrize("seq_lens", [[5], (5,), 5, None])
def test_lengths_that_are_no_tensor_are_refused_by_name(seq_lens: Any) -> None:
    with pytest.raises(BatchError, match=r"seq_lens='\w+' must be a tensor of lengths"):
        get_dcp_local_seq_lens(seq_lens, 2)


@given(st.lists(st.integers(0, 70), max_size=8))
def test_every_token_has_one_program_of_eight(query_lens: list[int]) -> None:
    starts = torch.from_numpy(np.cumsum([0, *query_lens]).astype(np.int32))
    with unmodified(starts):
        nums_dict, batch_ptr, offset_ptr = compute_causal_conv1d_metadata(starts)
    programs = [(row, index) for row, length in enumerate(query_lens) for index in range(-(-length // 8))]
    total = len(programs)
    assert list(zip(batch_ptr[:total].tolist(), offset_ptr[:total].tolist(), strict=True)) == programs
    assert set(batch_ptr[total:].tolist()) == set(offset_ptr[total:].tolist()) == {-1}
    assert len(batch_ptr) == len(offset_ptr) == 2048
    of_eight = nums_dict[8]
    assert of_eight["nums"].tolist() == [-(-length // 8) for length in query_lens]
    assert (of_eight["tot"], of_eight["mlist_len"]) == (total, total)
    assert of_eight["mlist"].tolist() == [row for row, _ in programs]
    assert of_eight["offsetlist"].tolist() == [index for _, index in programs]


def test_more_programs_than_1024_have_room_for_twice_as_many() -> None:
    _, batch_ptr, offset_ptr = compute_causal_conv1d_metadata(torch.tensor([0, 8 * 3000], dtype=torch.int32))
    assert len(batch_ptr) == len(offset_ptr) == 6000
    assert batch_ptr.dtype == offset_ptr.dtype == torch.int32


def test_the_programs_go_to_the_device_and_the_rest_stays() -> None:
    starts = torch.tensor([0, 9], dtype=torch.int32)
    nums_dict, batch_ptr, offset_ptr = compute_causal_conv1d_metadata(starts, device=torch.device("meta"))
    assert batch_ptr.device.type == offset_ptr.device.type == "meta"
    assert nums_dict[8]["mlist"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        (torch.tensor([0, 4, 3]), "query_start_loc=-1 is the length of request 1; least is 0"),
        (torch.tensor([[0, 4]]), r"query_start_loc=\(1, 2\) must be of shape"),
        (torch.empty(0), r"query_start_loc=\(0,\) must be of shape"),
        (torch.empty(3, device="meta"), "query_start_loc='meta' must be on the host"),
    ],
)
def test_start_locations_that_mean_nothing_are_refused(starts: torch.Tensor, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        compute_causal_conv1d_metadata(starts)
