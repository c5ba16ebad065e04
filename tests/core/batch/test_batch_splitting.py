"""Decodes, extends and prefills told apart, and prefills cut to fit a workspace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from batch_strategies import common_of, on_meta, ordered_lengths, starts_of, unmodified
from hypothesis import given
from hypothesis import strategies as st

from attnplug.core.batch import (
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
    split_prefill_chunks,
)
from attnplug.core.errors import BatchError

THRESHOLDS = st.integers(1, 4)


@given(st.data(), THRESHOLDS)
def test_a_split_partitions_the_batch_at_the_first_longer_request(
    data: st.DataObject, threshold: int
) -> None:
    query_lens, seq_lens = data.draw(ordered_lengths(threshold))
    common = common_of(query_lens, seq_lens)
    with unmodified(common):
        decodes, prefills, decode_tokens, prefill_tokens = split_decodes_and_prefills(common, threshold)
    assert decodes + prefills == len(query_lens)
    assert all(query <= threshold for query in query_lens[:decodes])
    assert all(query > threshold for query in query_lens[decodes:])
    assert decode_tokens == sum(query_lens[:decodes])
    assert prefill_tokens == sum(query_lens[decodes:])


@given(st.data(), THRESHOLDS)
def test_extends_have_context_and_prefills_none(data: st.DataObject, threshold: int) -> None:
    query_lens, seq_lens = data.draw(ordered_lengths(threshold))
    common = common_of(query_lens, seq_lens)
    with unmodified(common):
        split = split_decodes_prefills_and_extends(common, threshold)
    requests, tokens = split[:3], split[3:]
    ends = np.cumsum([0, *requests]).tolist()
    kinds = [
        "decode" if query <= threshold else "extend" if length > query else "prefill"
        for query, length in zip(query_lens, seq_lens, strict=True)
    ]
    for number, kind in enumerate(("decode", "extend", "prefill")):
        part = slice(ends[number], ends[number + 1])
        assert set(kinds[part]) <= {kind}
        assert tokens[number] == sum(query_lens[part])
    assert ends[-1] == len(query_lens)


@given(st.data(), THRESHOLDS)
def test_nothing_waits_for_the_device(data: st.DataObject, threshold: int) -> None:
    common = common_of(*data.draw(ordered_lengths(threshold)))
    absent = on_meta(common)
    assert split_decodes_and_prefills(absent, threshold) == split_decodes_and_prefills(common, threshold)
    expected = split_decodes_prefills_and_extends(common, threshold)
    assert split_decodes_prefills_and_extends(absent, threshold) == expected


@pytest.mark.parametrize(
    ("query_lens", "threshold", "uniform", "expected"),
    [
        ([3, 1, 1], 2, False, (0, 3, 0, 5)),  # the first is longer: no decodes
        ([1, 2, 3, 1], 2, False, (2, 2, 3, 4)),  # a short one after a longer one is a prefill
        ([2, 2, 1, 5], 4, True, (2, 2, 4, 6)),  # the first's length ends at the third
        ([2, 2, 2], 4, True, (3, 0, 6, 0)),
        ([5, 5], 4, True, (0, 2, 0, 10)),
        ([0, 0, 7], 1, False, (2, 1, 0, 7)),
        ([], 1, False, (0, 0, 0, 0)),
    ],
)
def test_where_the_prefills_start(
    query_lens: list[int], threshold: int, uniform: bool, expected: tuple[int, ...]
) -> None:
    assert split_decodes_and_prefills(common_of(query_lens), threshold, uniform) == expected


@pytest.mark.parametrize("threshold", [1, 4])
def test_rows_of_length_0_pad_a_uniform_batch(threshold: int) -> None:
    query = min(threshold, 2)
    padded = common_of([query, query, 0, 0], num_actual_tokens=4 * query)
    assert split_decodes_and_prefills(padded, threshold, require_uniform=True) == (4, 0, 4 * query, 0)
    with pytest.raises(BatchError, match=f"num_actual_tokens={2 * query} must be {4 * query}"):
        split_decodes_and_prefills(common_of([query, query, 0, 0]), threshold, require_uniform=True)


def test_padded_tokens_belong_to_the_last_kind() -> None:
    assert split_decodes_and_prefills(common_of([1, 1], num_actual_tokens=8)) == (2, 0, 8, 0)
    assert split_decodes_and_prefills(common_of([1, 5], num_actual_tokens=8)) == (1, 1, 1, 7)
    extended = common_of([1, 5], [3, 9], num_actual_tokens=8)
    assert split_decodes_prefills_and_extends(extended) == (1, 1, 0, 1, 7, 0)


@pytest.mark.parametrize("num_reqs", [1, 1024])
def test_counts_are_python_ints(num_reqs: int) -> None:
    common = common_of([1] * (num_reqs - 1) + [70], [9] * (num_reqs - 1) + [70])
    for split in (split_decodes_and_prefills(common), split_decodes_prefills_and_extends(common)):
        assert all(type(count) is int for count in split)
    assert split_decodes_prefills_and_extends(common) == (num_reqs - 1, 0, 1, num_reqs - 1, 0, 70)


def test_a_short_prompt_counts_as_what_it_stands_among() -> None:
    assert split_decodes_prefills_and_extends(common_of([1, 9, 1], [5, 9, 1])) == (1, 0, 2, 1, 0, 10)
    assert split_decodes_prefills_and_extends(common_of([1, 9, 3], [5, 12, 8]), 4) == (1, 2, 0, 1, 12, 0)


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "message"),
    [
        ([9, 9], [9, 12], "request 1, an extend of 9 tokens with 3 computed' must not be after a prefill"),
        ([9, 1], [9, 12], "request 1, a decode of 1 tokens with 11 computed' must not be after a prefill"),
        ([9, 1], [11, 12], "request 1, a decode .* must not be after an extend; reorder the batch"),
    ],
)
def test_a_batch_out_of_order_is_refused(query_lens: list[int], seq_lens: list[int], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        split_decodes_prefills_and_extends(common_of(query_lens, seq_lens))


@pytest.mark.parametrize("split", [split_decodes_and_prefills, split_decodes_prefills_and_extends])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc_cpu": starts_of([3, -1])}, "query_start_loc_cpu=-1 is the length of request 1"),
        ({"query_start_loc_cpu": starts_of([3])}, r"query_start_loc_cpu=\(2,\) must be of shape \(3,\)"),
        (
            {"query_start_loc_cpu": starts_of([1, 1]).to("meta")},
            "query_start_loc_cpu='meta' must be on the host",
        ),
    ],
)
def test_start_locations_that_mean_nothing_are_refused(
    split: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BatchError, match=message):
        split(common_of([1, 1], **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": torch.tensor([4, 4, 4])}, r"seq_lens=\(3,\) must be of shape \(2,\)"),
        ({"seq_lens": torch.tensor([4, 2])}, "seq_lens=2 of request 1 must be at least its query length 3"),
        ({"seq_lens_host": np.array([4])}, r"seq_lens_host=\(1,\) must be of shape \(2,\)"),
        (
            {"seq_lens": torch.empty(2, device="meta")},
            "seq_lens_host=None must be exact.*; give the batch exact",
        ),
        (
            {
                "seq_lens": torch.empty(2, device="meta"),
                "seq_lens_host": np.array([9, 9]),
                "seq_lens_host_exact": False,
            },
            "seq_lens_host='an upper bound' must be exact",
        ),
    ],
)
def test_lengths_that_the_host_does_not_know_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        split_decodes_prefills_and_extends(common_of([1, 3], [4, 4], **changes))


def test_the_cached_host_lengths_are_used() -> None:
    common = common_of([1, 3], [4, 3], seq_lens=torch.empty(2, device="meta"))
    common._seq_lens_cpu = torch.tensor([4, 3])
    assert split_decodes_prefills_and_extends(common) == (1, 0, 1, 1, 0, 3)


@given(st.lists(st.integers(0, 20), max_size=12), st.integers(20, 45), st.integers(0, 5))
def test_chunks_are_the_greedy_ones(seq_lens: list[int], workspace: int, offset: int) -> None:
    expected, start, total = [], 0, 0
    for row, length in enumerate(seq_lens):
        if total + length > workspace:
            expected.append((start + offset, row + offset))
            start, total = row, 0
        total += length
    if seq_lens:
        expected.append((start + offset, len(seq_lens) + offset))
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    with unmodified(lengths):
        assert split_prefill_chunks(lengths, workspace, offset) == expected
    assert split_prefill_chunks(seq_lens, workspace, offset) == expected


def test_lengths_that_sum_past_32_bits_do_not_wrap() -> None:
    lengths = np.full(4, 2**30, dtype=np.int32)
    assert split_prefill_chunks(lengths, 3 * 2**30) == [(0, 3), (3, 4)]


@pytest.mark.parametrize(
    ("seq_lens", "workspace", "message"),
    [
        ([4, 9], 8, r"seq_lens_cpu=9 of request 3 must be in 0 .. workspace_size=8"),
        ([4, -1], 8, "seq_lens_cpu=-1 of request 3"),
        ([[4]], 8, r"seq_lens_cpu=\(1, 1\) must have one dimension"),
        ([4], -1, "workspace_size=-1 must be an integer of at least 0"),
    ],
)
def test_a_workspace_smaller_than_one_request_is_refused(seq_lens: Any, workspace: int, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        split_prefill_chunks(torch.tensor(seq_lens), workspace, request_offset=2)
