"""Micro-batches run one by one are the whole batch."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from batch_strategies import Lengths, common_of, lengths, on_meta, starts_of, unmodified
from hypothesis import assume, given
from hypothesis import strategies as st
from paged_keys import PagedKeys

from attnplug.core import CommonAttentionMetadata
from attnplug.core.batch import UBatchSlice, slice_query_start_locs, split_attn_metadata
from attnplug.core.errors import BatchError


def part(requests: tuple[Any, Any], tokens: tuple[Any, Any]) -> UBatchSlice:
    return UBatchSlice(slice(*requests), slice(*tokens))


def cut_at(common: CommonAttentionMetadata, cuts: list[int]) -> list[UBatchSlice]:
    """Micro-batches between token positions, each with every request that has a token in it."""
    starts, bounds = common.query_start_loc_cpu.numpy(), [0, *cuts, common.num_actual_tokens]
    parts = []
    for begin, end in itertools.pairwise(bounds):
        first = int(np.searchsorted(starts, begin, side="right")) - 1
        parts.append(part((first, int(np.searchsorted(starts, end, side="left"))), (begin, end)))
    return parts


@st.composite
def cut_batches(draw: st.DrawFn) -> tuple[Lengths, list[int]]:
    drawn = draw(lengths())
    tokens = sum(drawn[0])
    assume(tokens > 0)
    cuts = draw(st.sets(st.integers(1, tokens - 1), max_size=4)) if tokens > 1 else set()
    return drawn, sorted(cuts)


@given(cut_batches())
def test_micro_batches_one_by_one_equal_the_whole(drawn: tuple[Lengths, list[int]]) -> None:
    (query_lens, seq_lens), cuts = drawn
    keys = PagedKeys.of(query_lens, seq_lens, 3)
    parts = cut_at(keys.common, cuts)
    with unmodified(keys.common):
        batches = split_attn_metadata(parts, keys.common)
    outputs = [
        keys.attend(batch, keys.query[part.token_slice]) for part, batch in zip(parts, batches, strict=True)
    ]
    torch.testing.assert_close(torch.cat(outputs), keys.attend(), rtol=0, atol=1e-12)


@given(cut_batches())
def test_counts_describe_each_micro_batch(drawn: tuple[Lengths, list[int]]) -> None:
    (query_lens, seq_lens), cuts = drawn
    common = common_of(query_lens, seq_lens)
    for piece, batch in zip(
        cut_at(common, cuts), split_attn_metadata(cut_at(common, cuts), common), strict=True
    ):
        assert (
            batch.num_actual_tokens
            == piece.num_tokens
            == len(batch.slot_mapping)
            == batch.query_start_loc[-1]
        )
        assert batch.num_reqs == len(batch.seq_lens) == len(batch.block_table_tensor)
        assert batch.max_seq_len == batch.seq_lens.max()
        assert batch.max_query_len == batch.query_start_loc.diff().max()
        assert torch.equal(batch.query_start_loc, batch.query_start_loc_cpu)
        assert batch.seq_lens_host is not None
        assert batch.seq_lens_host.tolist() == batch.seq_lens.tolist()
        counts = (batch.num_reqs, batch.num_actual_tokens, batch.max_query_len, batch.max_seq_len)
        assert all(type(count) is int for count in counts)


@given(cut_batches())
def test_nothing_waits_for_the_device(drawn: tuple[Lengths, list[int]]) -> None:
    (query_lens, seq_lens), cuts = drawn
    common = common_of(query_lens, seq_lens)
    parts = cut_at(common, cuts)
    batches = split_attn_metadata(parts, common)
    for absent, batch in zip(split_attn_metadata(parts, on_meta(common)), batches, strict=True):
        assert absent.query_start_loc.device.type == absent.seq_lens.device.type == "meta"
        assert absent.query_start_loc.shape == batch.query_start_loc.shape
        assert torch.equal(absent.query_start_loc_cpu, batch.query_start_loc_cpu)
        assert absent.max_seq_len == batch.max_seq_len


def test_a_thousand_requests_are_cut_in_the_middle_of_one() -> None:
    common = common_of([1] * 1000 + [50] * 24, [9] * 1000 + [50] * 24)
    first, second = split_attn_metadata(
        [part((0, 1005), (0, 1210)), part((1004, 1024), (1210, 2200))], common
    )
    assert (first.num_reqs, first.query_start_loc.diff()[-1], first.seq_lens[-1]) == (1005, 10, 10)
    assert (second.num_reqs, second.query_start_loc.diff()[0], second.seq_lens[0]) == (20, 40, 50)


def test_padded_tokens_go_with_the_last_request() -> None:
    common = common_of([2, 2], [2, 2], num_actual_tokens=8, slot_mapping=torch.arange(8))
    (batch,) = split_attn_metadata([part((1, 2), (2, 8))], common)
    assert (batch.num_actual_tokens, batch.query_start_loc.tolist(), batch.seq_lens.tolist()) == (
        6,
        [0, 2],
        [2],
    )


def test_a_dummy_run_keeps_its_longest_query() -> None:
    common = common_of([0, 0], [0, 0], num_actual_tokens=8, max_query_len=4, slot_mapping=torch.arange(8))
    (batch,) = split_attn_metadata([part((0, 2), (0, 8))], common)
    assert batch.max_query_len == 4


def test_upper_bounds_stay_upper_bounds() -> None:
    absent = on_meta(common_of([2, 2], [6, 9]))
    bound = dataclasses.replace(absent, seq_lens_host_exact=False)
    (batch,) = split_attn_metadata([part((0, 1), (0, 1))], bound)
    assert batch.seq_lens_host is not None
    assert (batch.seq_lens_host.tolist(), batch.seq_lens_host_exact, batch.max_seq_len) == ([5], False, 5)
    unknown = dataclasses.replace(absent, seq_lens_host=None)
    (batch,) = split_attn_metadata([part((0, 1), (0, 1))], unknown)
    assert (batch.seq_lens_host, batch.max_seq_len) == (None, 9)


def test_optional_fields_are_cut_with_their_requests() -> None:
    common = common_of(
        [2, 4],
        [6, 9],
        encoder_seq_lens=torch.tensor([3, 5]),
        encoder_seq_lens_cpu=np.array([3, 5]),
        key_start_loc=starts_of([5, 8]),
        key_start_loc_cpu=starts_of([5, 8]),
    )
    with unmodified(common):
        _, batch = split_attn_metadata([part((0, 1), (0, 2)), part((1, 2), (2, 3))], common)
    assert batch.encoder_seq_lens is not None
    assert batch.key_start_loc is not None
    assert batch.encoder_seq_lens.tolist() == [5]
    assert batch.key_start_loc.tolist() == [0, 5]  # three of the last eight keys come later
    assert batch.dcp_local_seq_lens is None
    shares = common_of([2, 4], [6, 9], dcp_local_seq_lens=torch.tensor([3, 5]))
    (batch,) = split_attn_metadata([part((1, 2), (2, 6))], shares)
    assert batch.dcp_local_seq_lens is not None
    assert batch.dcp_local_seq_lens.tolist() == [5]


def test_rebased_start_locations_are_a_new_tensor() -> None:
    starts = starts_of([2, 3, 4])
    with unmodified(starts):
        rebased = slice_query_start_locs(starts, slice(1, 3))
        rebased += 1
    assert rebased.tolist() == [1, 4, 8]
    assert slice_query_start_locs(starts, slice(0, 2)).tolist() == [0, 2, 5]
    assert slice_query_start_locs(starts, slice(None)).tolist() == [0, 2, 5, 9]


def test_a_slice_knows_whether_it_is_empty() -> None:
    assert part((1, 1), (0, 4)).is_empty()
    assert part((0, 1), (4, 4)).is_empty()
    assert not part((0, 1), (0, 4)).is_empty()


@pytest.mark.parametrize(
    ("requests", "tokens", "message"),
    [
        ((0, 1), (0, 0), r"token_slice=slice\(0, 0, None\) must be a slice with bounds in 0 .. 9 that holds"),
        ((1, 1), (0, 4), r"request_slice=slice\(1, 1, None\) must be a slice with bounds in 0 .. 3"),
        ((0, 4), (0, 9), r"request_slice=slice\(0, 4, None\)"),
        ((-1, 3), (0, 9), r"request_slice=slice\(-1, 3, None\)"),
        ((None, 3), (0, 9), r"request_slice=slice\(None, 3, None\)"),
        ((0, 3), (0, 10), r"token_slice=slice\(0, 10, None\)"),
        ((1, 3), (1, 9), r"token_slice=\(1, 9\) must start inside request 1, its tokens 2 to 5"),
        ((0, 3), (2, 9), r"token_slice=\(2, 9\) must start inside request 0, its tokens 0 to 2"),
        ((0, 2), (0, 6), r"token_slice=\(0, 6\) must end inside request 1, its tokens 2 to 5"),
        ((0, 3), (0, 4), r"token_slice=\(0, 4\) must end inside request 2, its tokens 5 to 9"),
    ],
)
def test_ranges_that_leave_their_requests_are_refused(
    requests: tuple[Any, Any], tokens: tuple[int, int], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        split_attn_metadata([part(requests, tokens)], common_of([2, 3, 4]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": False}, r"token_slice=\(0, 1\) cuts a request whose tokens see later ones \(causal=False\)"),
        ({"dcp_local_seq_lens": torch.tensor([1, 1])}, "shortens a request whose shares per rank are fixed; compute"),
        ({"block_table_tensor": torch.zeros(3, 4)}, r"block_table_tensor=\(3, 4\) must be of shape \(2, max_blo"),
        ({"seq_lens": torch.tensor([2])}, r"seq_lens=\(1,\) must be of shape \(2,\)"),
        ({"query_start_loc_cpu": starts_of([2, -2])}, "query_start_loc_cpu=-2 is the length of request 1"),
    ],
)  # fmt: skip
def test_a_batch_that_cannot_be_cut_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        split_attn_metadata([part((0, 1), (0, 1))], common_of([2, 2], **changes))


def test_the_second_half_of_a_request_whose_tokens_see_later_ones_is_refused() -> None:
    with pytest.raises(BatchError, match="cuts a request whose tokens see later ones"):
        split_attn_metadata([part((0, 1), (1, 2))], common_of([2], causal=False))
