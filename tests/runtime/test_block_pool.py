"""Blocks handed out, shared and taken back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.core.errors import BatchError
from attnplug.runtime import BlockPool


def test_block_0_is_never_handed_out():
    pool = BlockPool(4)
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.num_free == 0
    assert pool.users(0) == 0


def test_a_pool_of_the_null_block_alone_has_none_to_give():
    assert BlockPool(1).num_free == 0
    assert BlockPool(1).allocate(0) == []


def test_exhausted_blocks_are_refused_and_nothing_is_taken():
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(BatchError, match=r"count=3 must be in 0 .. 2, the free blocks of 4; free blocks"):
        pool.allocate(3)
    assert pool.allocate(2) == [2, 3]


def test_freed_blocks_are_handed_out_last():
    pool = BlockPool(5)
    first = pool.allocate(2)
    pool.free(first)
    assert pool.allocate(4) == [3, 4, *first]


def test_a_shared_block_is_free_once_both_have_given_it_back():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.share([block])
    assert pool.users(block) == 2
    pool.free([block])
    assert (pool.users(block), pool.num_free) == (1, 1)
    pool.free([block])
    assert (pool.users(block), pool.num_free) == (0, 2)


def test_a_cached_block_that_nobody_uses_can_be_taken_back_into_use():
    pool = BlockPool(4)
    pool.share([2])
    assert pool.num_free == 2
    assert pool.allocate(2) == [1, 3]


def test_a_block_shared_again_and_again_keeps_one_place_in_the_queue():
    pool = BlockPool(4)
    for _ in range(5):
        pool.share([1])
        pool.free([1])
    assert pool.num_free == 3
    assert pool.allocate(3) == [2, 3, 1]


def test_null_blocks_are_passed_over():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.share([0, block, 0])
    pool.free([0, block, 0, block])
    assert pool.num_free == 2


def test_one_call_may_free_a_block_twice_if_it_has_two_users():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.share([block])
    pool.free([block, block])
    assert pool.users(block) == 0


def test_blocks_freed_too_often_are_named_and_none_is_freed():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    with pytest.raises(BatchError, match=f"blocks={second} is freed 2 times and has 1 users"):
        pool.free([first, second, second])
    assert (pool.users(first), pool.num_free) == (1, 1)


@pytest.mark.parametrize("wrong", [-1, 4, 2**70, 1.5, "1", None, True])
@pytest.mark.parametrize("call", ["share", "free"])
def test_what_is_no_block_of_the_pool_is_refused_and_nothing_changes(call, wrong):
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    with pytest.raises(BatchError, match=r"must be integers in 0 .. 3"):
        getattr(pool, call)([block, wrong])
    assert (pool.users(block), pool.num_free) == (1, 2)


def test_users_of_what_is_no_block_are_refused():
    with pytest.raises(BatchError, match="block=9 must be"):
        BlockPool(4).users(9)


def test_numpy_block_numbers_are_blocks():
    pool = BlockPool(4)
    pool.share(np.array([1, 2], dtype=np.int32))
    assert pool.num_free == 1


@pytest.mark.parametrize("blocks", [0, -3])
def test_a_pool_without_a_null_block_is_refused(blocks):
    with pytest.raises(BatchError, match=f"num_blocks={blocks} must be at least 1"):
        BlockPool(blocks)


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free"]), st.integers(1, 5)), max_size=40))
def test_free_blocks_are_those_without_users(calls):
    pool = BlockPool(6)
    users = dict.fromkeys(range(1, 6), 0)
    for call, number in calls:
        if call == "allocate" and number <= pool.num_free:
            for block in pool.allocate(number):
                assert users[block] == 0
                users[block] = 1
        elif call == "share":
            pool.share([number])
            users[number] += 1
        elif call == "free" and users[number]:
            pool.free([number])
            users[number] -= 1
        assert {block: pool.users(block) for block in users} == users
        assert pool.num_free == sum(count == 0 for count in users.values())
