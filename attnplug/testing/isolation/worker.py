"""The pytest plugin of a worker process: its share of memory, its time, and a log that outlives it."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import signal
import sys
from collections.abc import Generator
from types import FrameType
from typing import Any

import pytest

from attnplug.testing.conformance.check import ConformanceError
from attnplug.testing.isolation.deaths import GPU_LOST
from attnplug.testing.plugin import SUITE

__all__ = ["ORDERS", "Orders", "check_id"]

ORDERS = "attnplug"
"""The key of a worker's input under which its orders are."""

Orders = dict[str, Any]
"""`ids` to run, reasons of those `known` to fail, `timeout` in seconds, `memory` in bytes or None, `threads`, and the file `log`."""

_GRACE = 2.0
"""Seconds by which pytest-timeout, which leaves the worker alive, comes before the end of the process."""


@pytest.hookimpl(tryfirst=True)  # before anything imports the backend
def pytest_configure(config: pytest.Config) -> None:
    """Take the orders, in a worker; the controller has none."""
    orders = getattr(config, "workerinput", {}).get(ORDERS)
    if orders is not None:
        config.pluginmanager.register(Worker(orders))


class Worker:
    """Keeps one process to its orders.

    Two clocks run for each check. pytest-timeout's signal raises where Python runs, and the worker goes on.
    Where it cannot, in C code or with signals blocked, faulthandler's own thread writes to the log where the
    process hangs, and ends it.

    Args:
        orders: what the controller sent.
    """

    def __init__(self, orders: Orders) -> None:
        self._ids = list(orders["ids"])
        self._known = dict(orders["known"])
        self._timeout = float(orders["timeout"])
        # Before torch is imported, which reads it then.
        os.environ.setdefault("OMP_NUM_THREADS", str(orders["threads"]))
        self._log = os.open(orders["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        # What C code says before it aborts goes to the log too.
        os.dup2(self._log, 2)
        faulthandler.enable(self._log)
        self._signalled = False
        signal.signal(signal.SIGINT, self._interrupt)
        if orders["memory"] is not None:
            _limit_memory(orders["memory"])

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keep the checks that were ordered, in that order."""
        suite = session.config.stash[SUITE]
        by_id = {check.id: check for check in suite.checks}
        checks = tuple(by_id[each] for each in self._ids if each in by_id)
        session.config.stash[SUITE] = dataclasses.replace(suite, checks=checks, known=self._known)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Start the log anew, and the second clock."""
        os.ftruncate(self._log, 0)
        os.lseek(self._log, 0, os.SEEK_SET)
        faulthandler.dump_traceback_later(self._timeout + _GRACE, exit=True, file=self._log)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self) -> Generator[None, object, object]:
        """Errors are logged, not captured: a capture dies with the process. Only a signal is an interrupt."""
        os.dup2(self._log, 2)
        try:
            return (yield)
        except KeyboardInterrupt:
            if self._signalled:
                raise
            raise ConformanceError("raised KeyboardInterrupt") from None
        except Exception as problem:
            self._end_without_gpu(problem)
            raise

    def _end_without_gpu(self, problem: Exception) -> None:
        """After some errors of a kernel nothing runs on the GPU any more, until another process begins."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os.ftruncate(self._log, 0)
            os.lseek(self._log, 0, os.SEEK_SET)
            os.write(self._log, f"{GPU_LOST}{type(problem).__name__}: {problem}".encode())
            os._exit(1)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        signal.default_int_handler(number, frame)


def check_id(nodeid: str) -> str:
    """The check's id in "attnplug/testing/suite.py::test_conformance[ID]", which "@GROUP" may follow."""
    return nodeid.partition("[")[2].partition("]")[0]


def _limit_memory(limit: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # no such limit on this system
        import resource

        # Data, not address space: libraries map far more than they use.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
