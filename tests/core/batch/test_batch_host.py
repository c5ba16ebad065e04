"""What the host reads of a batch."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from attnplug.core.batch.host import is_one_each, query_spans
from attnplug.core.errors import BatchError
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.core.spec import LayerSpec
from attnplug.testing import paged_batch


def batch(starts: list[int], tokens: int, dtype: torch.dtype = torch.int32) -> CommonAttentionMetadata:
    lengths = [max(after - before, 1) for before, after in itertools.pairwise(starts)]
    spec = LayerSpec(num_heads=1, num_kv_heads=1, head_size=16)
    common = paged_batch(spec, [1] * len(lengths), lengths, block_size=16).common
    return dataclasses.replace(
        common, query_start_loc_cpu=torch.tensor(starts, dtype=dtype), num_actual_tokens=tokens
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("starts", "tokens"),
    [([0, 1, 2, 3], 3), ([0, 0, 2, 3], 3), ([0, 1, 2, 2], 3), ([0, 2, 5], 5), ([0, 1], 1), ([0, 1, 2], 4)],
)
def test_spans_are_starts_and_their_differences(starts: list[int], tokens: int, dtype: torch.dtype) -> None:
    found, lengths = query_spans(batch(starts, tokens, dtype))
    assert found.tolist() == starts
    assert lengths.tolist() == np.diff(starts).tolist()
    assert lengths.dtype == found.dtype


def test_lengths_that_batches_share_cannot_be_written() -> None:
    _, lengths = query_spans(batch([0, 1, 2], 2))
    with pytest.raises(ValueError, match="read-only"):
        lengths[0] = 2


@pytest.mark.parametrize(
    ("starts", "tokens", "limit"),
    [
        ([0, 2, 1, 3], 3, "is the length of request 1"),
        ([1, 2, 3], 2, r"must go from 0 to at most 2"),
        ([0, 1, 3], 2, r"must go from 0 to at most 2"),
    ],
)
def test_ragged_starts_are_refused(starts: list[int], tokens: int, limit: str) -> None:
    with pytest.raises(BatchError, match=limit):
        query_spans(batch(starts, tokens))


def test_starts_of_another_shape_are_refused_for_decodes_too() -> None:
    common = batch([0, 1, 2], 2)
    column = dataclasses.replace(common, query_start_loc_cpu=common.query_start_loc_cpu[:, None])
    with pytest.raises(BatchError, match=r"must be of shape \(3,\)"):
        query_spans(column)


def test_one_query_of_each_request_is_recognised():
    for starts, tokens, dtype in (([0, 1, 2], 2, torch.int32), ([0], 0, torch.int32)):
        assert is_one_each(query_spans(batch(starts, tokens, dtype))[1])
    for starts, tokens in (([0, 2, 2], 2), ([0, 1, 1], 2), ([0, 1, 3], 3)):
        assert not is_one_each(query_spans(batch(starts, tokens))[1])
    # As many ones from elsewhere may change.
    assert not is_one_each(np.ones(2, dtype=np.int32))


def test_start_locations_need_not_be_contiguous():
    whole = torch.tensor([[0, 7], [1, 7], [2, 7]], dtype=torch.int32)
    common = dataclasses.replace(batch([0, 1, 2], 2), query_start_loc_cpu=whole[:, 0])
    starts, lengths = query_spans(common)
    assert (starts.tolist(), lengths.tolist()) == ([0, 1, 2], [1, 1])
