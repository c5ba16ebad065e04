"""The page-table arrays of a step, against cases made by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnplug.backends.flashinfer.step import HostStep, Part, StepPages
from attnplug.errors import BatchError


def step(new: list[int], tokens: list[int], page_size: int = 4, causal: bool = True) -> HostStep:
    starts = np.cumsum([0, *new]).astype(np.int32)
    return HostStep.of(starts, np.array(new, np.int32), np.array(tokens, np.int32), page_size, causal)


def arrays(part: Part | None) -> dict[str, list[int]]:
    assert part is not None
    return {
        name: getattr(part, name).tolist() for name in ("qo_indptr", "kv_indptr", "last_page_len", "seq_lens")
    }


def test_decodes_and_others_have_arrays_that_start_at_0() -> None:
    found = step([1, 1, 3, 5], [4, 9, 3, 13])
    assert arrays(found.decode) == {
        "qo_indptr": [0, 1, 2],
        "kv_indptr": [0, 1, 4],
        "last_page_len": [4, 1],
        "seq_lens": [4, 9],
    }
    assert arrays(found.prefill) == {
        "qo_indptr": [0, 3, 8],
        "kv_indptr": [0, 1, 5],
        "last_page_len": [3, 1],
        "seq_lens": [3, 13],
    }
    assert found.decode is not None
    assert found.prefill is not None
    assert (found.decode.first_token, found.decode.first_page, found.decode.max_query_len) == (0, 0, 1)
    assert (found.prefill.first_token, found.prefill.first_page, found.prefill.max_query_len) == (2, 4, 5)
    assert (found.kv_indptr.tolist(), found.num_pages, found.most_pages) == ([0, 1, 4, 5, 9], 9, 4)
    assert found.rows is found.seen is None
    assert all(each.dtype == np.int32 for each in (found.kv_indptr, found.prefill.last_page_len))


def test_what_follows_the_first_longer_request_is_no_decode() -> None:
    found = step([1, 2, 1], [5, 5, 5])
    assert found.decode is not None
    assert found.prefill is not None
    assert found.decode.num_tokens == 1
    assert found.prefill.qo_indptr.tolist() == [0, 2, 3]


def test_a_step_may_have_one_kind_only_or_none() -> None:
    assert step([1, 1], [2, 2]).prefill is None
    assert step([2], [2]).decode is None
    empty = step([], [])
    assert (empty.decode, empty.prefill, empty.num_pages, empty.num_tokens) == (None, None, 0, 0)


def test_requests_without_queries_are_left_out() -> None:
    found = step([0, 1, 0, 2], [7, 5, 0, 2])
    assert found.rows is not None
    assert found.rows.tolist() == [1, 3]
    assert found.seen is None
    assert arrays(found.decode)["kv_indptr"] == [0, 2]
    assert arrays(found.prefill)["seq_lens"] == [2]


def test_queries_that_see_nothing_are_left_out() -> None:
    # The second request's first two rows stand before position 0; the third has no key.
    found = step([1, 5, 1], [4, 3, 0])
    assert found.rows is not None
    assert found.seen is not None
    assert (found.rows.tolist(), found.seen.tolist()) == ([0, 1], [0, 3, 4, 5])
    assert arrays(found.prefill)["qo_indptr"] == [0, 3]
    assert found.num_tokens == 4


def test_keys_of_a_cross_layer_are_counted_apart_from_its_queries() -> None:
    found = step([5, 2, 1], [3, 0, 9], causal=False)
    assert found.rows is not None
    assert found.seen is not None
    assert (found.rows.tolist(), found.seen.tolist()) == ([0, 2], [0, 1, 2, 3, 4, 7])
    assert arrays(found.prefill)["seq_lens"] == [3, 9]


def test_a_full_last_page_has_the_page_size() -> None:
    assert arrays(step([1, 1, 1], [15, 16, 17], 16).decode)["last_page_len"] == [15, 16, 1]
    assert arrays(step([1, 1], [1, 2], 1).decode) == {
        "qo_indptr": [0, 1, 2],
        "kv_indptr": [0, 1, 3],
        "last_page_len": [1, 1],
        "seq_lens": [1, 2],
    }


def test_a_table_without_room_is_refused() -> None:
    pages = StepPages(step([1], [9]), torch.tensor([9]), torch.zeros(1, 2, dtype=torch.int32), None, None)
    with pytest.raises(BatchError, match=r"\(1, 2\).*3 pages"):
        pages.check()
