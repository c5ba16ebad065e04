"""Host arrays of steps share blocks, never elements."""

from __future__ import annotations

import numpy as np

from attnplug.backends.flashinfer.latent_plans import HostArrays


def test_arrays_that_share_a_block_keep_their_own_values() -> None:
    arrays = HostArrays()
    made = [
        arrays.copy(np.full(count, count, dtype=np.int32)) for count in (0, 1, 5000, 5001, 7000, 40000, 3)
    ]
    assert [each.tolist() for each in made] == [[each.size] * each.size for each in made]
    assert made[2].base is made[3].base
    assert made[3].base is not made[4].base


def test_many_arrays_are_made_of_one_allocation_however_long_they_are() -> None:
    arrays = HostArrays()
    for count in (16, 100_000):
        arrays.empty(count)
        blocks = {id(each.base) for each in [arrays.empty(count) for _ in range(3)]}
        assert len(blocks) == 1
