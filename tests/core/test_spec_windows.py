"""Windows and chunks: which keys a LayerSpec says are seen."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_strategies import SIZES

from attnplug.core import AttentionType, LayerSpec
from attnplug.errors import SpecError

ENCODERS = [kind for kind in AttentionType if kind is not AttentionType.DECODER]
sides = st.integers(-1, 1 << 20)


def refusal(**arguments: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        LayerSpec(**{**SIZES, **arguments})
    return caught.value


def test_a_window_counts_keys_on_each_side() -> None:
    spec = LayerSpec(**SIZES, attn_type="encoder", window=(3, 5))
    assert spec.window == (3, 5)
    assert spec.is_windowed


def test_causality_makes_the_right_side_zero() -> None:
    assert LayerSpec(**SIZES, window=(3, -1)).window == (3, 0)
    assert LayerSpec(**SIZES, window=(3, 5)).window == (3, 0)


def test_a_sliding_window_counts_the_query_itself() -> None:
    spec = LayerSpec(**SIZES, sliding_window=4096)
    assert spec.window == (4095, 0)
    assert spec.sliding_window == 4096
    assert spec == LayerSpec(**SIZES, window=(4095, 0))


def test_a_sliding_window_of_one_sees_the_query_alone() -> None:
    spec = LayerSpec(**SIZES, sliding_window=1)
    assert spec.window == (0, 0)
    assert spec.is_windowed


@given(st.integers(1, 1 << 30))
def test_a_sliding_window_reads_back_as_it_was_given(width: int) -> None:
    assert LayerSpec(**SIZES, sliding_window=width).sliding_window == width


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_must_state_both_sides(kind: AttentionType) -> None:
    error = refusal(attn_type=kind, sliding_window=128)
    assert error.field == "sliding_window"
    assert error.remedy == "state both sides: window=(left, right)"


def test_a_non_causal_decoder_must_state_both_sides() -> None:
    assert refusal(causal=False, sliding_window=128).field == "sliding_window"


@pytest.mark.parametrize("window", [(3, -1), (0, 0), (-1, 5)])
def test_a_window_is_given_in_one_way_only(window: tuple[int, int]) -> None:
    assert f"cannot be given with window={window}" in str(refusal(window=window, sliding_window=4))


def test_a_window_without_limits_may_stand_beside_a_sliding_window() -> None:
    assert LayerSpec(**SIZES, window=(-1, -1), sliding_window=4).window == (3, 0)
    assert LayerSpec(**SIZES, window=(-1, 0), sliding_window=4).window == (3, 0)


@pytest.mark.parametrize("window", [(-2, 0), (0, -2), (-2, -2)])
def test_minus_one_is_the_only_negative_side(window: tuple[int, int]) -> None:
    assert str(refusal(window=window)) == f"window={window} must not go below -1, which means no limit"


@pytest.mark.parametrize(
    "window", [None, 4, (4,), (1, 2, 3), (1.0, 2), ("1", "2"), "12", (True, 0), (4, None)]
)
def test_a_window_is_two_integers(window: object) -> None:
    assert str(refusal(window=window)) == f"window={window!r} must be (left, right), two integers"


@given(sides, sides, st.sampled_from(AttentionType))
def test_a_window_is_a_plain_tuple_whatever_it_came_as(left: int, right: int, kind: AttentionType) -> None:
    spec = LayerSpec(**SIZES, attn_type=kind, window=[left, right])
    assert spec.window == (left, 0 if spec.causal else right)
    assert type(spec.window) is tuple


@given(sides, sides, st.sampled_from(AttentionType))
def test_a_layer_is_windowed_when_its_window_hides_a_key(left: int, right: int, kind: AttentionType) -> None:
    spec = LayerSpec(**SIZES, attn_type=kind, window=(left, right))
    hides_right = right >= 0 and not spec.causal
    assert spec.is_windowed is (left >= 0 or hides_right)
    assert spec.sliding_window == (left + 1 if spec.causal and left >= 0 else None)


def test_a_two_sided_window_has_no_sliding_window() -> None:
    assert LayerSpec(**SIZES, attn_type="encoder", window=(3, 0)).sliding_window is None


def test_a_chunk_is_a_number_of_keys() -> None:
    assert LayerSpec(**SIZES, chunk_size=8192).chunk_size == 8192


@pytest.mark.parametrize("arguments", [{"window": (3, -1)}, {"sliding_window": 4}, {"window": (0, 0)}])
def test_a_window_and_a_chunk_exclude_each_other(arguments: dict[str, Any]) -> None:
    error = refusal(chunk_size=8192, **arguments)
    assert "cannot be given with window=" in str(error)
    assert error.remedy == "give one of the two"


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_chunk_needs_a_causal_layer(kind: AttentionType) -> None:
    assert "needs a causal layer" in str(refusal(attn_type=kind, chunk_size=64))
