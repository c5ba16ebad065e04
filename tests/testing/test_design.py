"""The search finds a served row for each two values that go together, and packing needs few rows for all of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest

from attnplug.testing.design.search import Row, Search, crossed_rows, most_adding, packed_rows, served_pairs

AXES = {"a": [0, 1, 2], "b": ["x", "y"], "c": [None, False, True], "d": [0, 1], "e": list("klmn")}


class Picking(Search):
    """Serves the rows that `serves` accepts."""

    order = tuple(AXES)

    def __init__(self, serves: Callable[[Row], bool]) -> None:
        self.asked: list[Row] = []
        self._serves = serves
        super().__init__(AXES)

    def ask(self, row: Row) -> Sequence[str]:
        self.asked.append(row)
        return () if self._serves(row) else ("refused",)


def any_row(row: Row) -> bool:
    return True


def picky(row: Row) -> bool:
    """`a=2` only with `b="y"`; `c=True` with neither `d=1` nor `e="n"`."""
    return (row["a"] != 2 or row["b"] == "y") and not (
        row["c"] is True and (row["d"] == 1 or row["e"] == "n")
    )


def not_plain(row: Row) -> bool:
    """The plainest row is refused."""
    return picky(row) and row["d"] == 1


def packed(serves: Callable[[Row], bool], seed: int = 0) -> list[Row]:
    search = Picking(serves)
    return packed_rows(search, served_pairs(search), seed=seed)


def held(rows: list[Row]) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(pair) for row in rows for pair in itertools.combinations(row.items(), 2)}


def every_row() -> list[Row]:
    return [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


@pytest.mark.parametrize("serves", [any_row, picky, not_plain])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_pair_of_a_served_row_is_in_a_packed_row(serves: Callable[[Row], bool], seed: int) -> None:
    rows = packed(serves, seed)
    assert all(map(serves, rows))
    assert all(list(row) == list(AXES) for row in rows)
    assert held(rows) == held(list(filter(serves, every_row())))


@pytest.mark.parametrize("serves", [any_row, picky, not_plain])
def test_the_row_of_a_pair_is_served_if_any_row_with_it_is(serves: Callable[[Row], bool]) -> None:
    search = Picking(serves)
    served = held(list(filter(serves, every_row())))
    for pair, row in search.pairs():
        assert set(pair) <= row.items()
        assert serves(row) == (frozenset(pair) in served)


def test_the_row_of_a_pair_is_the_plainest() -> None:
    plain = {axis: values[0] for axis, values in AXES.items()}
    found = dict(Picking(picky).pairs())
    assert found[("c", True), ("d", 0)] == {**plain, "c": True}
    assert found[("a", 2), ("d", 1)] == {**plain, "a": 2, "b": "y", "d": 1}
    assert found[("c", True), ("d", 1)] == {**plain, "c": True, "d": 1}  # refused


def test_each_row_is_asked_once() -> None:
    search = Picking(picky)
    packed_rows(search, served_pairs(search))
    assert len(search.asked) == len({tuple(row.values()) for row in search.asked})


def test_pairs_take_far_fewer_rows_than_there_are() -> None:
    least = max(len(one) * len(other) for one, other in itertools.combinations(AXES.values(), 2))
    assert least <= len(packed(any_row)) <= 1.5 * least < math.prod(map(len, AXES.values()))


@pytest.mark.parametrize("serves", [any_row, picky, not_plain])
@pytest.mark.parametrize("count", [2, 3])
def test_values_are_crossed_where_they_are_served_with_plain_ones(
    serves: Callable[[Row], bool], count: int
) -> None:
    search = Picking(serves)
    axes = {"a": [0, 2], "b": ["x", "y"], "c": [None, True], "d": [0, 1]}
    rows = crossed_rows(search, axes, count)
    assert all(map(serves, rows))
    wanted = {
        frozenset(some)
        for names in itertools.combinations(axes, count)
        for some in itertools.product(*([(name, value) for value in axes[name]] for name in names))
        if serves({**search.base, **dict(some)})
    }
    assert wanted
    found = {frozenset(some) for row in rows for some in itertools.combinations(row.items(), count)}
    assert wanted <= found
    assert {row["e"] for row in rows} == {search.base["e"]}
    assert crossed_rows(search, axes, count) == rows


def test_crossed_values_need_not_be_of_the_search() -> None:
    rows = crossed_rows(Picking(any_row), {"a": [0, 7], "d": [0, 1]}, 2)
    assert {(row["a"], row["d"]) for row in rows} == {(0, 0), (0, 1), (7, 0), (7, 1)}


def test_the_same_seed_gives_the_same_rows_and_another_gives_others() -> None:
    assert packed(picky, seed=3) == packed(picky, seed=3)
    assert packed(picky, seed=3) != packed(picky, seed=4)


def test_if_no_row_is_served_there_is_none() -> None:
    assert packed(lambda row: False) == []


def test_keys_are_in_the_order_of_what_they_add() -> None:
    sets = {"few": {1}, "most": {1, 2, 3}, "other": {4, 5}, "same": {2, 3}, "as other": {6, 7}}
    assert most_adding(sets) == ["most", "other", "as other", "few", "same"]
    assert most_adding(sets, {1, 4, 5}) == ["most", "as other", "few", "other", "same"]
    assert most_adding(sets, most=2) == ["most", "other"]
    assert most_adding({}) == []
