"""The place of a rank: each token is on exactly one rank, and a rank's slots are those of its tokens in order."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.core import ContextParallel
from attnplug.core.batch import compute_slot_mapping, get_dcp_local_seq_lens
from attnplug.core.batch.context_parallel import local_lengths
from attnplug.core.batch.slots import _on_device
from attnplug.errors import BatchError, SpecError

_PLACES = st.builds(
    lambda size, rank, interleave: ContextParallel(size, rank % size, interleave),
    st.integers(1, 5),
    st.integers(0, 4),
    st.sampled_from([1, 2, 4, 8]),
)


@given(_PLACES, st.integers(0, 90))
def test_each_token_is_on_one_rank_and_in_order_there(place: ContextParallel, length: int) -> None:
    positions = np.arange(length)
    for rank in range(place.size):
        one = ContextParallel(place.size, rank, place.interleave)
        own = positions[one.owner(positions) == rank]
        assert one.local_position(own).tolist() == list(range(one.local_length(length)))
        assert one.local_length(length) == place.local_length(length, rank) <= place.most_local(length)
        lengths = torch.tensor([length])
        assert int(local_lengths(lengths, one)) == one.local_length(length)
        given_ = get_dcp_local_seq_lens(lengths, place.size, rank, place.interleave)
        assert int(given_) == one.local_length(length)
    assert sum(place.local_length(length, rank) for rank in range(place.size)) == length
    assert max(place.local_length(length, rank) for rank in range(place.size)) <= place.most_local(length)


@pytest.mark.parametrize("kind", ["numpy", "tensor", "device"])
@given(_PLACES, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1, max_size=4))
def test_slots_are_those_of_own_tokens_and_minus_one(
    kind: str, place: ContextParallel, requests: list[tuple[int, int]]
) -> None:
    block = 8
    computed, new = np.array([one for one, _ in requests]), np.array([one for _, one in requests])
    table = np.random.default_rng(0).permutation(64)[: len(requests) * 10].reshape(len(requests), 10)
    slots = _slots(kind, table, computed, new, block, place)
    expected = []
    for row, (old, count) in enumerate(requests):
        for position in range(old, old + count):
            page, inside = divmod(position, block * place.size)
            mine = inside // place.interleave % place.size == place.rank
            local = inside // (place.interleave * place.size) * place.interleave + inside % place.interleave
            expected.append(int(table[row, page]) * block + local if mine else -1)
    assert slots == [*expected, -1]


def _slots(kind: str, table: Any, computed: Any, new: Any, block: int, place: ContextParallel) -> list[int]:
    total = int(new.sum()) + 1
    if kind == "numpy":
        made: Any = compute_slot_mapping(
            table, computed, new, block, num_tokens=total, context_parallel=place
        )
    else:
        given_ = [torch.from_numpy(part) for part in (table, computed, new)]
        if kind == "tensor":
            made = compute_slot_mapping(*given_, block, num_tokens=total, context_parallel=place)
        else:
            one = None if place.size == 1 else place
            made = _on_device(block, total, *given_, None, None, one)
    return made.tolist()


def test_a_run_that_a_block_would_cut_is_refused() -> None:
    one = np.array([1])
    with pytest.raises(BatchError, match=r"interleave=3 must divide block_size=8"):
        compute_slot_mapping(one[:, None], one, one, 8, context_parallel=ContextParallel(2, 0, 3))
    with pytest.raises(BatchError, match="must be a ContextParallel or None"):
        compute_slot_mapping(one[:, None], one, one, 8, context_parallel=2)  # type: ignore[call-overload]


def test_a_table_covers_the_tokens_of_all_ranks() -> None:
    table, none, place = np.array([[5]]), np.array([0]), ContextParallel(2, 1)
    slots = compute_slot_mapping(table, none, np.array([16]), 8, context_parallel=place)
    assert sorted(slots[slots >= 0]) == list(range(40, 48))
    with pytest.raises(BatchError, match="past its table: 1 blocks of 16 tokens"):
        compute_slot_mapping(table, none, np.array([17]), 8, context_parallel=place)


@pytest.mark.parametrize("arguments", [(0,), (2, 2), (2, -1), (2, 0, 0), (2, 0, 1.5), (True, 0, "1")])
def test_an_impossible_place_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(SpecError):
        ContextParallel(*arguments)


def test_a_place_is_a_value() -> None:
    place = ContextParallel(3, 1, 4)
    assert pickle.loads(pickle.dumps(place)) == place == ContextParallel.from_dict(place.to_dict())
    assert hash(place) == hash(ContextParallel(3, 1, 4))
    assert place != ContextParallel(3, 1, 2)
    assert place != (3, 1, 4)
    with pytest.raises(SpecError, match="must have exactly interleave, rank, size"):
        ContextParallel.from_dict({"size": 2})
    with pytest.raises(SpecError, match="rank=3 must be below 3"):
        place.local_length(4, 3)
