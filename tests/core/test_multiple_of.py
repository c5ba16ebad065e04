"""MultipleOf: open-ended sets of sizes."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from attnplug.core import MultipleOf, Reason
from attnplug.errors import SpecError

items = st.integers(1, 300) | st.integers(1, 64).map(MultipleOf)


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_it_contains_every_positive_multiple(base: int, factor: int) -> None:
    assert base * factor in MultipleOf(base)
    assert -base * factor not in MultipleOf(base)
    assert base * factor + 1 not in MultipleOf(base) or base == 1


def test_zero_is_in_no_set_of_sizes() -> None:
    assert 0 not in MultipleOf(1)


@pytest.mark.parametrize("base", [0, -16, True, 16.0, "16"])
def test_its_base_is_an_integer_of_at_least_one(base: int) -> None:
    with pytest.raises(SpecError, match=r"MultipleOf\.base=.*at least 1"):
        MultipleOf(base)


def test_it_prints_as_words() -> None:
    assert [str(MultipleOf(16)), str(MultipleOf(1))] == ["multiples of 16", "any size"]


def test_sizes_are_allowed_by_number_or_by_multiple() -> None:
    sizes = (8, MultipleOf(16))
    assert [size for size in range(50) if MultipleOf.allows(sizes, size)] == [8, 16, 32, 48]
    assert not MultipleOf.allows((), 16)


@pytest.mark.parametrize(
    ("sizes", "wanted", "nearest"),
    [
        ((MultipleOf(1),), 16, 16),
        ((MultipleOf(16),), 17, 32),
        ((MultipleOf(128), 32), 64, 128),
        ((64, 32), 16, 32),
        ((8, 4), 16, 8),
        ((MultipleOf(16),), 0, 16),
    ],
)
def test_the_nearest_size_is_the_next_above_or_else_the_largest(
    sizes: tuple[int | MultipleOf, ...], wanted: int, nearest: int
) -> None:
    assert MultipleOf.nearest(sizes, wanted) == nearest


@given(st.lists(items, min_size=1, max_size=5), st.integers(1, 300))
def test_the_nearest_size_is_allowed_and_none_lies_between(
    sizes: list[int | MultipleOf], wanted: int
) -> None:
    nearest = MultipleOf.nearest(sizes, wanted)
    assert MultipleOf.allows(sizes, nearest)
    assume(nearest > wanted)
    assert not any(MultipleOf.allows(sizes, size) for size in range(wanted, nearest))


def test_there_is_no_nearest_of_no_sizes() -> None:
    with pytest.raises(SpecError, match="at least one size"):
        MultipleOf.nearest((), 16)


def test_single_multiples_can_be_left_out():
    sizes = MultipleOf(16, but=(128, 64))
    assert [size for size in range(0, 161, 16) if size in sizes] == [16, 32, 48, 80, 96, 112, 144, 160]
    assert str(sizes) == "multiples of 16 other than 128 and 64"
    assert MultipleOf.nearest((sizes,), 60) == 80
    with pytest.raises(SpecError, match=r"MultipleOf\.but=.*integers"):
        MultipleOf(16, but=("128",))


def test_a_refusal_names_the_multiples_left_out():
    reason = Reason(
        "block_size not supported", code="block_size", requested=128, supported=[MultipleOf(16, but=(128,))]
    )
    assert reason == "block_size not supported: 128 is not a multiple of 16 other than 128"
