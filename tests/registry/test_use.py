"""`use` asks for a backend inside a block, for this thread and this task alone."""

from __future__ import annotations

import asyncio
import threading
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
