"""Selection: its shapes, its views, and the values that are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sample_batches import batch

from attnplug.core import CommonAttentionMetadata, Selection, SparseSpec
from attnplug.core.batch import UBatchSlice, split_attn_metadata
from attnplug.core.composite.routing import Router
from attnplug.errors import BatchError

TOKENS, BLOCKS = SparseSpec("token_topk", 3), SparseSpec("block", 2, 4)


def selection(*rows: list[int], width: int = 4) -> Selection:
    """Rows of positions; None of a row is not given."""
    made = Selection.allocate(len(rows), width, "cpu")
    for row, positions in enumerate(rows):
        made.positions[row, : len(positions)] = torch.tensor(positions, dtype=torch.int32)
        made.counts[row] = len(positions)
    return made


def test_new_buffers_are_not_given_and_a_cleared_one_may_pick_nothing() -> None:
    made = Selection.allocate(2, 3, "cpu")
    assert (made.positions.dtype, made.counts.dtype) == (torch.int32, torch.int32)
    assert (made.positions.tolist(), made.counts.tolist()) == ([[-1] * 3] * 2, [-1, -1])
    made.counts.fill_(3)
    made.clear(0)
    assert made.counts.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("positions", "counts"),
    [
        (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(6, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)),
        (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)),
        ([[1]], torch.zeros(1, dtype=torch.int32)),
    ],
)
def test_tensors_of_another_form_are_refused(positions: torch.Tensor, counts: torch.Tensor) -> None:
    with pytest.raises(BatchError, match="selection"):
        Selection(positions, counts)


def test_a_part_of_it_sees_what_is_written_later() -> None:
    whole = selection([0], [1], [0, 2])
    part = whole[1:]
    whole.positions[2, 0] = 1
    whole.counts[1] = 0
    assert (part.positions[1].tolist(), part.counts.tolist()) == ([1, 2, -1, -1], [0, 2])


def test_a_copy_takes_the_columns_that_fit() -> None:
    narrow, wide = Selection.allocate(3, 2, "cpu"), Selection.allocate(3, 5, "cpu")
    given = selection([0], [1, 0])
    narrow.copy_from(given)
    wide.positions.fill_(9)
    wide.copy_from(given)
    assert narrow.positions.tolist() == [[0, -1], [1, 0], [-1, -1]]
    assert wide.positions[:2].tolist() == [[0, -1, -1, -1, -1], [1, 0, -1, -1, -1]]
    assert narrow.counts.tolist() == [1, 2, -1]


ENDS = torch.tensor([5, 9])


@pytest.mark.parametrize(
    ("sparse", "rows", "message"),
    [
        (TOKENS, ([4, 0, 2], [5, 8]), None),
        (TOKENS, ([], []), None),
        (TOKENS, ([0, 5], [1]), r"positions\[0, 1\]=5 is past the last of the positions"),
        (TOKENS, ([0], [-2]), r"positions\[1, 0\]=-2 must be at or after 0"),
        (TOKENS, ([0], [3, 1, 3]), r"positions\[1, 2\]=3 comes twice"),
        (TOKENS, ([0, 1, 2, 3], [0]), r"counts\[0\]=4 must be in 0 \.\. 3"),
        (BLOCKS, ([1, 0], [2, 0]), None),
        (BLOCKS, ([2], [0]), r"positions\[0, 0\]=2 is past the last of the blocks"),
        (BLOCKS, ([0], [1, 1]), "comes twice: blocks of a query differ"),
        (BLOCKS, ([0, 1, 2], [0]), r"counts\[0\]=3 must be in 0 \.\. 2"),
    ],
)
def test_values_are_checked_by_row(
    sparse: SparseSpec, rows: tuple[list[int], ...], message: str | None
) -> None:
    made = selection(*rows)
    if message is None:
        made.check_values(sparse, ENDS)
    else:
        with pytest.raises(BatchError, match=message):
            made.check_values(sparse, ENDS)


def test_a_forgotten_row_is_named_with_the_remedy() -> None:
    made = selection([0], [1])
    made.counts[1] = -1
    with pytest.raises(BatchError, match=r"counts\[1\]=-1 is not given; write the step's selection before"):
        made.check_values(TOKENS, ENDS)


def test_positions_after_the_counted_ones_are_refused() -> None:
    made = selection([0], [1])
    made.positions[1, 3] = 2
    with pytest.raises(BatchError, match=r"positions\[1, 3\]=2 must be -1 after"):
        made.check_values(TOKENS, ENDS)


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(BatchError, match="selection=1 must have a row for each of the step's 2 tokens"):
        selection([0]).check_values(TOKENS, ENDS)


# A step's parts


def step(query_lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
    tokens = sum(query_lens)
    chosen = selection(*([token] for token in range(tokens)))
    return dataclasses.replace(batch(query_lens, seq_lens), selection=chosen)


def rows_of(common: CommonAttentionMetadata) -> list[int]:
    assert common.selection is not None
    return common.selection.positions[:, 0].tolist()


def test_a_view_without_padding_has_the_rows_of_its_tokens() -> None:
    assert rows_of(step([1, 1, 3], [4, 5, 6]).unpadded(2, 2)) == [0, 1]


def test_the_halves_of_a_composite_have_their_own_rows() -> None:
    common = step([1, 1, 3], [4, 5, 6])
    cut = Router(()).split(common, 1, False)
    assert cut.decode is not None
    assert cut.prefill is not None
    assert (rows_of(cut.decode), rows_of(cut.prefill)) == ([0, 1], [2, 3, 4])
    assert common.selection is not None
    common.selection.positions[3, 0] = 7
    assert rows_of(cut.prefill) == [2, 7, 4]


def test_micro_batches_have_their_own_rows() -> None:
    common = step([2, 4], [4, 6])
    parts = split_attn_metadata(
        [UBatchSlice(slice(0, 2), slice(0, 3)), UBatchSlice(slice(1, 2), slice(3, 6))], common
    )
    assert [rows_of(part) for part in parts] == [[0, 1, 2], [3, 4, 5]]


def test_its_tensors_cannot_be_replaced() -> None:
    made = selection([0])
    # Layers and graphs hold these very tensors, and an indexer writes into them.
    for field in ("positions", "counts"):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field, getattr(made, field).clone())
    assert made != made[:]
    assert hash(made) == object.__hash__(made)
