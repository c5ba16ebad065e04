"""Groups of checks on workers that may die: every check is begun once, and none is waited for in vain."""

from __future__ import annotations

import types
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.testing.isolation.controller import GroupScheduler


class Worker:
    """A worker as pytest-xdist's: it begins a check once it knows the next one, or that there is none."""

    def __init__(self, number: int) -> None:
        self.gateway = types.SimpleNamespace(id=f"gw{number}")
        self.queue: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices) -> None:
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def is_ready(self) -> bool:
        return len(self.queue) > 1 or (self.shutting_down and bool(self.queue))


class Session:
    """Plays pytest-xdist's part: workers run what they are given, die of some checks, and are replaced."""

    def __init__(self, ids, deadly, jobs: int) -> None:
        options = {"tx": [f"{jobs}*popen"], "loadscopereorder": False}
        config = types.SimpleNamespace(
            getvalue=options.__getitem__,
            option=types.SimpleNamespace(loadscopereorder=False),
            hook=types.SimpleNamespace(),
        )
        self.ids, self.deadly = ids, deadly
        self.scheduler = GroupScheduler(config)
        self.begun: list[tuple[str, str]] = []
        self.blamed: list[str | None] = []
        self.made = 0
        self.workers = [self.new() for _ in range(jobs)]
        self.collected(self.workers)

    def new(self) -> Worker:
        self.made += 1
        return Worker(self.made)

    def collected(self, workers) -> None:
        for worker in workers:
            self.scheduler.add_node(worker)
            self.scheduler.add_node_collection(worker, self.ids)
        self.scheduler.schedule()

    def run(self) -> None:
        while ready := [worker for worker in self.workers if worker.is_ready]:
            worker = ready[len(self.begun) % len(ready)]
            check = self.ids[index := worker.queue.pop(0)]
            self.begun.append((worker.gateway.id, check))
            if check in self.deadly:
                self.workers.remove(worker)
                self.blamed.append(self.scheduler.remove_node(worker))
                self.workers.append(self.new())
                self.collected(self.workers[-1:])
            else:
                self.scheduler.mark_test_complete(worker, index)

    def end(self) -> None:
        for worker in self.workers:
            assert not worker.queue
            if worker in self.scheduler.nodes:
                assert self.scheduler.remove_node(worker) is None


def node_ids(groups) -> list[str]:
    return [
        f"suite.py::test[{group}-{number}]" + (f"@{group}" if size > 1 else "")
        for group, size in enumerate(groups)
        for number in range(size)
    ]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 4), st.data())
def test_every_check_is_begun_once_and_blamed_for_its_own_deaths_only(groups, jobs, data):
    ids = node_ids(groups)
    deadly = data.draw(st.sets(st.sampled_from(ids)))
    session = Session(ids, deadly, jobs)
    session.run()
    assert Counter(check for _, check in session.begun) == Counter(ids)
    assert Counter(session.blamed) == Counter(deadly)
    session.end()


def test_a_group_stays_with_one_worker_and_its_rest_goes_on_with_another():
    ids = node_ids([3, 3, 3])
    session = Session(ids, {ids[1]}, 2)
    session.run()
    workers = {check: worker for worker, check in session.begun}
    assert workers[ids[0]] == workers[ids[1]] != workers[ids[2]]
    for rest in (ids[3:6], ids[6:]):
        assert len({workers[check] for check in rest}) == 1


def test_a_worker_that_was_never_ready_is_not_known():
    with pytest.raises(KeyError):
        Session(node_ids([1]), set(), 1).scheduler.remove_node(Worker(9))
