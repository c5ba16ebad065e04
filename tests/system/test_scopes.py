"""Values of blocks hold until their own block ends, in whatever order and context that is."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug._system.scopes import Scopes


@pytest.fixture
def scopes() -> Scopes[str]:
    return Scopes("tried")


def test_the_innermost_comes_first_and_the_outer_comes_back(scopes: Scopes[str]) -> None:
    assert scopes.get() == ()
    with scopes.block("a") as value, scopes.block("b"):
        assert value == "a"
        assert scopes.get() == ("b", "a")
    assert scopes.get() == ()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_blocks_may_end_in_any_order(scopes: Scopes[str], order: tuple[int, ...]) -> None:
    blocks = [scopes.block(name) for name in "abc"]
    for each in blocks:
        each.__enter__()
    left = {0, 1, 2}
    for place in order:
        blocks[place].__exit__(None, None, None)
        left.remove(place)
        assert scopes.get() == tuple("abc"[each] for each in sorted(left, reverse=True))


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_what_holds_is_what_has_begun_and_not_ended(steps: list[tuple[bool, int]]) -> None:
    scopes: Scopes[int] = Scopes("tried")
    held: dict[int, AbstractContextManager[int]] = {}
    for begins, name in steps:
        if begins and name not in held:
            held[name] = scopes.block(name)
            held[name].__enter__()
        elif not begins and name in held:
            held.pop(name).__exit__(None, None, None)
        assert scopes.get() == tuple(reversed(held))
    for each in held.values():
        each.__exit__(None, None, None)
    assert scopes.get() == ()


def test_equal_values_are_told_apart(scopes: Scopes[str]) -> None:
    first, second = scopes.block("a"), scopes.block("a")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert scopes.get() == ("a",)
    second.__exit__(None, None, None)
    assert scopes.get() == ()


def test_a_block_ends_where_it_raises(scopes: Scopes[str]) -> None:
    for error in (RuntimeError, KeyboardInterrupt, GeneratorExit):
        with pytest.raises(error), scopes.block("a"):
            raise error
        assert scopes.get() == ()


def in_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def in_context(work: Callable[[], Any]) -> Any:
    return contextvars.copy_context().run(work)


def in_empty_context(work: Callable[[], Any]) -> Any:
    return contextvars.Context().run(work)


ELSEWHERE = {"thread": in_thread, "copied context": in_context, "empty context": in_empty_context}


@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_block_may_end_in_another_context_than_it_began_in(scopes: Scopes[str], place: str) -> None:
    run = ELSEWHERE[place]
    with scopes.block("outer"):
        block = scopes.block("a")
        block.__enter__()
        run(lambda: block.__exit__(None, None, None))
        assert scopes.get() == ("outer",)
        with scopes.block("b"):
            assert scopes.get() == ("b", "outer")
    assert scopes.get() == ()


@pytest.mark.parametrize("place", ELSEWHERE)
def test_a_block_that_began_elsewhere_does_not_hold_here(scopes: Scopes[str], place: str) -> None:
    block = scopes.block("a")
    ELSEWHERE[place](block.__enter__)
    assert scopes.get() == ()
    block.__exit__(None, None, None)
    assert scopes.get() == ()


def test_a_copied_context_has_what_is_open_until_it_ends(scopes: Scopes[str]) -> None:
    with scopes.block("a"):
        copied = contextvars.copy_context()
        assert copied.run(scopes.get) == ("a",)
    assert copied.run(scopes.get) == ()


def test_a_task_that_outlives_the_block_it_began_in_does_not_keep_the_value(scopes: Scopes[str]) -> None:
    async def main() -> tuple[tuple[str, ...], tuple[str, ...]]:
        ended = asyncio.Event()

        async def lives_on() -> tuple[tuple[str, ...], tuple[str, ...]]:
            inside = scopes.get()
            await ended.wait()
            return inside, scopes.get()

        with scopes.block("a"):
            task = asyncio.create_task(lives_on())
            await asyncio.sleep(0)
        ended.set()
        return await task

    assert asyncio.run(main()) == (("a",), ())


def test_generators_that_end_out_of_order_leave_nothing(scopes: Scopes[str]) -> None:
    def work(name: str) -> Iterator[tuple[str, ...]]:
        with scopes.block(name):
            yield scopes.get()
            yield scopes.get()

    first, second = work("a"), work("b")
    assert next(first) == ("a",)
    assert next(second) == ("b", "a")
    first.close()  # type: ignore[attr-defined]
    assert next(second) == ("b",)
    assert list(second) == []
    assert scopes.get() == ()


def test_a_generator_that_is_dropped_ends_its_block_also_from_another_thread(scopes: Scopes[str]) -> None:
    def work() -> Iterator[None]:
        with scopes.block("a"):
            yield

    held = [work()]
    next(held[0])
    thread = threading.Thread(target=lambda: (held.clear(), gc.collect()))
    thread.start()
    thread.join()
    assert scopes.get() == ()


def test_asynchronous_generators_may_be_closed_by_another_task(scopes: Scopes[str]) -> None:
    async def stream(name: str) -> Any:
        with scopes.block(name):
            while True:
                yield scopes.get()

    async def main() -> tuple[Any, ...]:
        first, second = stream("a"), stream("b")
        seen = [await anext(first), await anext(second)]
        await asyncio.create_task(first.aclose())
        seen.append(scopes.get())
        await asyncio.create_task(second.aclose())
        return (*seen, scopes.get())

    assert asyncio.run(main()) == (("a",), ("b", "a"), ("b",), ())


def test_threads_that_begin_and_end_blocks_at_once_do_not_see_each_others(scopes: Scopes[str]) -> None:
    def work(name: str) -> bool:
        drawn, held, names = random.Random(name), [], []
        for count in range(200):
            if held and drawn.random() < 0.5:
                place = drawn.randrange(len(held))
                held.pop(place).__exit__(None, None, None)
                names.pop(place)
            else:
                held.append(scopes.block(f"{name}{count}"))
                names.append(held[-1].__enter__())
            if scopes.get() != tuple(reversed(names)):
                return False
        with contextlib.ExitStack() as stack:
            for each in held:
                stack.push(each)
        return scopes.get() == ()

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, "abcdefgh"))
