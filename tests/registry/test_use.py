"""`use` asks for a backend inside a block, for this thread and this task alone."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_plugins import CPU, SLIDING, SPEC, backend, registry

from attnplug import LayerSpec, use
from attnplug.errors import PolicyError

FOUND = registry(backend("A", 70), backend("B", 60), backend("C", 50))


def chosen(spec: LayerSpec = SPEC) -> str | None:
    return FOUND.select(spec, CPU).backend


def test_the_inner_block_is_asked_first_and_the_outer_where_it_says_nothing() -> None:
    with use("B"):
        with use("sliding=C"):
            assert (chosen(), chosen(SLIDING)) == ("B", "C")
        with use({"*": "A"}):
            assert chosen(SLIDING) == "A"
        assert chosen(SLIDING) == "B"
    assert chosen() == "A"


def test_a_block_ends_where_it_raises() -> None:
    with pytest.raises(RuntimeError, match="out"), use("B"):
        raise RuntimeError("out")
    assert chosen() == "A"


def test_a_block_that_asks_nothing_changes_nothing() -> None:
    with use():
        assert chosen() == "A"


def test_it_decorates_a_function() -> None:
    assert use("C")(chosen)() == "C"


def test_rules_that_cannot_be_read_raise_where_the_block_begins() -> None:
    with pytest.raises(PolicyError, match=r"attnplug\.use='A,,' has an empty part"), use("A,,"):
        pass
    assert chosen() == "A"


def test_other_threads_do_not_see_it() -> None:
    inside, done = threading.Event(), threading.Event()

    def other() -> tuple[str | None, str | None]:
        inside.wait()
        try:
            before = chosen()
            with use("C"):
                return before, chosen()
        finally:
            done.set()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(other)
        with use("B"):
            inside.set()
            done.wait()
            assert chosen() == "B"
        assert future.result() == ("A", "C")


def test_tasks_do_not_see_each_others() -> None:
    async def ask(name: str, mine: asyncio.Event, other: asyncio.Event) -> str | None:
        with use(name):
            mine.set()
            await other.wait()
            return chosen()

    async def both() -> list[str | None]:
        first, second = asyncio.Event(), asyncio.Event()
        return [*await asyncio.gather(ask("B", first, second), ask("C", second, first)), chosen()]

    assert asyncio.run(both()) == ["B", "C", "A"]


def test_blocks_of_generators_that_end_out_of_order_leave_no_rule() -> None:
    def work(name: str) -> Iterator[str | None]:
        with use(name):
            yield chosen()
            yield chosen()

    first, second = work("B"), work("C")
    assert (next(first), next(second), next(first)) == ("B", "C", "C")
    assert list(first) == []
    assert (chosen(), next(second)) == ("C", "C")
    assert list(second) == []
    assert chosen() == "A"


def test_a_block_that_ends_in_another_thread_leaves_no_rule_where_it_began() -> None:
    block = use("B")
    block.__enter__()
    assert chosen() == "B"
    with ThreadPoolExecutor(1) as pool:
        pool.submit(block.__exit__, None, None, None).result()
        assert pool.submit(chosen).result() == "A"
    assert chosen() == "A"


def test_a_context_that_outlives_the_block_has_no_rule_of_it() -> None:
    with use("B"):
        copied = contextvars.copy_context()
        assert copied.run(chosen) == "B"
    assert copied.run(chosen) == "A"


def test_options_of_blocks_end_with_them_too() -> None:
    first, second = use("sliding=B"), use("C")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (chosen(), chosen(SLIDING)) == ("C", "C")
    second.__exit__(None, None, None)
    assert (chosen(), chosen(SLIDING)) == ("A", "A")
