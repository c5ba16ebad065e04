"""Feature flags and their names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.core import Feature

feature_sets = st.sets(st.sampled_from(list(Feature)))


def union(flags: set[Feature]) -> Feature:
    together = Feature(0)
    for flag in flags:
        together |= flag
    return together


@given(feature_sets)
def test_names_are_lower_case_and_in_the_order_of_the_class(flags: set[Feature]) -> None:
    assert union(flags).names() == tuple(str(flag.name).lower() for flag in Feature if flag in flags)


def test_nothing_has_no_names() -> None:
    assert Feature(0).names() == ()


@pytest.mark.parametrize("flag", Feature)
def test_each_flag_is_one_bit_with_a_name_of_its_own(flag: Feature) -> None:
    assert flag.value.bit_count() == 1
    assert flag.names() == (str(flag.name).lower(),)


def test_a_flag_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ValueError, match="invalid value"):
        Feature(1 << len(Feature))
