"""Which keys a query sees: what a mask written out says of every pair of positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.core import LayerSpec
from attnplug.errors import BatchError
from attnplug.ops import Reach


@given(
    left=st.integers(-1, 9),
    right=st.integers(-1, 9),
    chunk=st.integers(0, 6),
    first=st.integers(0, 8),
    held=st.integers(0, 12),
)
def test_bounds_are_the_run_that_the_mask_allows(left, right, chunk, first, held):
    end = first + held
    positions = np.arange(first, max(end, first + 1))
    low, high = Reach(left, right, chunk).bounds(positions, np.int64(first), np.int64(end))
    for position, begin, stop in zip(positions, low, high, strict=True):
        seen = [
            key
            for key in range(first, end)
            if (left < 0 or key >= position - left)
            and (right < 0 or key <= position + right)
            and (not chunk or key >= position // chunk * chunk)
        ]
        assert list(range(begin, stop)) == seen
    assert (np.diff(low) >= 0).all()
    assert (np.diff(high) >= 0).all()


def test_a_batch_may_narrow_a_layer_and_not_widen_it():
    heads = {"num_heads": 2, "num_kv_heads": 2, "head_size": 16}
    wide = LayerSpec(**heads, causal=False, window=(3, 2))
    assert Reach.of(wide, causal=False) == Reach(3, 2, 0)
    assert Reach.of(wide, causal=True) == Reach(3, 0, 0)
    assert Reach.of(LayerSpec(**heads, chunk_size=8), causal=True) == Reach(-1, 0, 8)
    with pytest.raises(BatchError, match="cannot widen"):
        Reach.of(LayerSpec(**heads), causal=False)
