"""Covering rows hold every pair that a possible row can hold."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from attnplug.testing.conformance.covering import Row, covering_rows

AXES = {"a": [0, 1, 2], "b": ["x", "y"], "c": [None, False, True], "d": [0, 1], "e": list("klmn")}


def any_row(row: Row) -> bool:
    return True


def picky(row: Row) -> bool:
    """`a=2` only with `b="y"`; `c=True` with neither `d=1` nor `e="n"`."""
    return (row["a"] != 2 or row["b"] == "y") and not (
        row["c"] is True and (row["d"] == 1 or row["e"] == "n")
    )


def held(rows: list[Row], strength: int) -> set[frozenset[tuple[str, object]]]:
    return {frozenset(cells) for row in rows for cells in itertools.combinations(row.items(), strength)}


def every_row() -> list[Row]:
    return [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


@pytest.mark.parametrize("possible", [any_row, picky])
@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_what_a_possible_row_holds_is_held(possible: Callable[[Row], bool], strength: int, seed: int) -> None:
    rows = covering_rows(AXES, possible, strength=strength, seed=seed)
    assert all(map(possible, rows))
    assert all(list(row) == list(AXES) for row in rows)
    assert held(rows, strength) == held(list(filter(possible, every_row())), strength)


def test_pairs_take_far_fewer_rows_than_there_are() -> None:
    least = max(len(one) * len(other) for one, other in itertools.combinations(AXES.values(), 2))
    assert least <= len(covering_rows(AXES, any_row)) <= 2 * least < math.prod(map(len, AXES.values()))


def test_the_same_seed_gives_the_same_rows_and_another_gives_others() -> None:
    assert covering_rows(AXES, picky, seed=3) == covering_rows(AXES, picky, seed=3)
    assert covering_rows(AXES, picky, seed=3) != covering_rows(AXES, picky, seed=4)


def test_where_no_row_is_possible_there_is_none() -> None:
    assert covering_rows(AXES, lambda row: False) == []
    assert covering_rows({}, any_row) == []
