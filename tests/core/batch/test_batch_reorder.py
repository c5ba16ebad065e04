"""A running batch brought into order, with the fewest swaps there can be."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.core.batch import reorder_batch_to_split_decodes_and_prefills
from attnplug.core.errors import BatchError

DECODE, EXTEND, PREFILL = (1, 5), (4, 5), (4, 0)
"""Scheduled and computed tokens."""


@dataclasses.dataclass
class Rows:
    """An engine's batch, which counts swaps."""

    req_ids: list[str]
    num_computed_tokens_cpu: npt.NDArray[np.int32]
    swaps: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def swap_states(self, i1: int, i2: int) -> None:
        self.swaps.append((i1, i2))
        for rows in (self.req_ids, self.num_computed_tokens_cpu):
            rows[i1], rows[i2] = rows[i2], rows[i1]


@dataclasses.dataclass
class Scheduled:
    num_scheduled_tokens: dict[str, int]


def running(requests: list[tuple[int, int]]) -> tuple[Rows, Scheduled]:
    """A batch of (scheduled, computed), with rows to spare as engines have."""
    names = [f"request-{number}" for number in range(len(requests))]
    computed = np.array([computed for _, computed in requests] + [7, 7, 7], dtype=np.int32)
    return Rows(names, computed), Scheduled(dict(zip(names, (count for count, _ in requests), strict=True)))


def regions(requests: list[tuple[int, int]], threshold: int) -> tuple[int, ...]:
    return tuple(2 if not computed else int(count > threshold) for count, computed in requests)


@cache
def swaps_to_sort(start: tuple[int, ...]) -> int:
    """The fewest swaps that sort, by searching all of them breadth first."""
    goal, seen, queue = tuple(sorted(start)), {start}, deque([(start, 0)])
    while queue:
        order, count = queue.popleft()
        if order == goal:
            return count
        for i, j in itertools.combinations(range(len(order)), 2):
            after = list(order)
            after[i], after[j] = after[j], after[i]
            if after[i] != after[j] and tuple(after) not in seen:
                seen.add(tuple(after))
                queue.append((tuple(after), count + 1))
    raise AssertionError(start)


@given(st.lists(st.sampled_from([DECODE, EXTEND, PREFILL, (2, 3), (1, 0)]), max_size=7), st.integers(1, 2))
def test_the_batch_is_in_order_after_the_fewest_swaps(
    requests: list[tuple[int, int]], threshold: int
) -> None:
    batch, scheduled = running(requests)
    before, found = dict(zip(batch.req_ids, requests, strict=True)), regions(requests, threshold)
    changed = reorder_batch_to_split_decodes_and_prefills(batch, scheduled, threshold)
    after = regions([before[name] for name in batch.req_ids], threshold)
    assert list(after) == sorted(found)
    assert len(batch.swaps) == swaps_to_sort(found)
    assert changed is (len(batch.swaps) > 0)
    stayed = {row for row in range(len(found)) if found[row] == after[row]} - set(
        itertools.chain(*batch.swaps)
    )
    assert stayed == {row for row in range(len(found)) if found[row] == sorted(found)[row]}


def test_three_in_a_circle_take_two_swaps() -> None:
    for requests in ([EXTEND, PREFILL, DECODE], [PREFILL, DECODE, EXTEND]):
        batch, scheduled = running(requests)
        assert reorder_batch_to_split_decodes_and_prefills(batch, scheduled)
        assert len(batch.swaps) == 2


def test_a_short_prompt_is_a_prefill() -> None:
    batch, scheduled = running([(1, 0), DECODE])
    assert reorder_batch_to_split_decodes_and_prefills(batch, scheduled)
    assert batch.req_ids == ["request-1", "request-0"]


def test_a_thousand_requests_are_put_in_order() -> None:
    kinds = np.random.default_rng(0).integers(0, 3, 1024)
    batch, scheduled = running([(DECODE, EXTEND, PREFILL)[kind] for kind in kinds])
    assert reorder_batch_to_split_decodes_and_prefills(batch, scheduled)
    order = [int(kinds[int(name.split("-")[1])]) for name in batch.req_ids]
    assert order == sorted(order)
    assert len(batch.swaps) < 1024


def test_an_empty_batch_is_in_order() -> None:
    assert reorder_batch_to_split_decodes_and_prefills(*running([])) is False


def test_a_request_that_is_not_scheduled_is_refused() -> None:
    batch, _ = running([DECODE])
    with pytest.raises(BatchError, match="req_ids='request-0' has no num_scheduled_tokens"):
        reorder_batch_to_split_decodes_and_prefills(batch, Scheduled({}))


def test_rows_without_computed_counts_are_refused() -> None:
    batch, scheduled = running([DECODE, DECODE])
    batch.num_computed_tokens_cpu = batch.num_computed_tokens_cpu[:1]
    with pytest.raises(BatchError, match=r"num_computed_tokens_cpu=\(1,\) must have 2 rows or more"):
        reorder_batch_to_split_decodes_and_prefills(batch, scheduled)
