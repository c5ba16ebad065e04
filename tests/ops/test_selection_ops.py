"""Chosen positions as visible keys, and as the page table of a kernel with pages of one token."""

from __future__ import annotations

import pytest
import torch

from attnplug.core import Selection, SparseSpec
from attnplug.core.errors import BatchError
from attnplug.mla.selected import token_pages
from attnplug.ops import chosen_keys, slots_of_keys


def selection(rows: list[list[int]], counts: list[int] | None = None) -> Selection:
    given = [len(row) for row in rows] if counts is None else counts
    width = max(map(len, rows))
    padded = [row + [-1] * (width - len(row)) for row in rows]
    return Selection(torch.tensor(padded, dtype=torch.int32), torch.tensor(given, dtype=torch.int32))


def keys(rows: list[list[int]], sparse: SparseSpec, low: list[int], high: list[int], **given: list[int]):
    found, counts = chosen_keys(selection(rows, **given), sparse, torch.tensor(low), torch.tensor(high))
    assert [len([key for key in row if key >= 0]) for row in found.tolist()] == counts.tolist()
    return [row[:count] for row, count in zip(found.tolist(), counts.tolist(), strict=True)]


TOKENS = SparseSpec("token_topk", 8)


def test_keys_come_in_order_whatever_the_order_of_the_positions() -> None:
    assert keys([[7, 0, 3], [2, 1]], TOKENS, [0, 0], [9, 9]) == [[0, 3, 7], [1, 2]]


def test_the_range_of_the_mask_still_hides_keys() -> None:
    assert keys([[7, 0, 3, 4], [2]], TOKENS, [3, 5], [7, 5]) == [[3, 4], []]


def test_uncounted_positions_a_second_copy_and_a_count_that_is_not_given_are_left_out() -> None:
    assert keys([[5, 1, 2], [3, 3, 1], [4]], TOKENS, [0] * 3, [9] * 3, counts=[1, 3, -1]) == [[5], [1, 3], []]
    few = SparseSpec("token_topk", 2)
    assert keys([[5, 1, 2]], few, [0], [9]) == [[1, 5]]


def test_blocks_are_their_tokens() -> None:
    blocks = SparseSpec("block", 2, 4)
    assert keys([[2, 0], [1]], blocks, [0, 5], [10, 9]) == [[0, 1, 2, 3, 8, 9], [5, 6, 7]]


def test_slots_follow_the_block_table_beyond_32_bits() -> None:
    table = torch.tensor([[9, 2**31 - 1], [4, 6]], dtype=torch.int32)
    chosen = torch.tensor([[0, 17, -1], [3, -1, -1], [31, 16, 0]])
    slots = slots_of_keys(chosen, torch.tensor([0, 0, 1]), table, 16)
    assert slots.tolist() == [
        [9 * 16, (2**31 - 1) * 16 + 1, -1],
        [9 * 16 + 3, -1, -1],
        [6 * 16 + 15, 6 * 16, 4 * 16],
    ]


def test_pages_of_one_token_have_no_step_from_token_to_token() -> None:
    pages = torch.zeros(5, 1, 24)
    flat, steps = token_pages(pages)
    assert (flat.shape, steps) == ((5, 1, 24), (1, 0))
    slots = slots_of_keys(
        torch.tensor([[2, 0]]), torch.tensor([0]), torch.tensor([[4, 1, 3]], dtype=torch.int32), 1, steps
    )
    assert slots.tolist() == [[3, 4]]
    with pytest.raises(BatchError, match=r"steps=\(1, -1\) must be two integers of at least 0"):
        slots_of_keys(
            torch.tensor([[2]]), torch.tensor([0]), torch.tensor([[4]], dtype=torch.int32), 1, (1, -1)
        )
