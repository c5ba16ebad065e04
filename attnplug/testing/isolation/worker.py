"""The pytest plugin of a worker process: its limits of memory and time, and a log that outlives it."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import pytest

from attnplug._system.processes import own_number
from attnplug.testing.conformance.check import ConformanceError, time_limit
from attnplug.testing.isolation.deaths import GPU_LOST
from attnplug.testing.plugin import SUITE

SETTINGS = "attnplug"
"""The key of a worker's input for its settings, which `run.run_checks` lists."""

_GRACE = 2.0
"""Seconds that pytest-timeout, which leaves the worker alive, comes before the end of the process."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """In a worker, set the limits and then load the checks, which imports the backend."""
    settings = getattr(config, "workerinput", {}).get(SETTINGS)
    if settings is None:
        return  # the controller
    # torch reads the variable when it is imported, so nothing above may import torch.
    os.environ.setdefault("OMP_NUM_THREADS", str(settings["threads"]))
    config.pluginmanager.register(Worker(settings["log"], settings["timeout"]))
    if settings["memory"] is not None:
        _limit_memory(settings["memory"])
    from attnplug.testing.conformance.cases.designed_cases import Designs
    from attnplug.testing.conformance.suites import load_suite

    # Modules stay until the end: collections while they load, and later ones of them, are in vain.
    gc.disable()
    try:
        # The cases that the listing has found; to search for them again takes half a second.
        designs = Designs(Path(settings["designs"]).read_bytes())
        suite = load_suite(**{**settings["suite"], "only": settings["ids"], "designs": designs})
    except Exception as problem:
        # pytest-xdist ends the run without the reason after any other exception of a worker that starts.
        raise pytest.UsageError(f"{type(problem).__name__}: {problem}") from problem
    gc.freeze()
    gc.enable()
    by_id = {check.id: check for check in suite.checks}
    checks = tuple(by_id[each] for each in settings["ids"] if each in by_id)
    config.stash[SUITE] = dataclasses.replace(suite, checks=checks, known=settings["known"])


class Worker:
    """Stops checks that take too long, and logs why the process ends.

    Each check has two timers. The signal of pytest-timeout raises an exception if Python code runs, and the worker goes
    on. In C code, or with signals blocked, only faulthandler's own thread works: it logs the stack and ends the process.
    """

    def __init__(self, log: str, timeout: float) -> None:
        self._timeout = timeout
        Path(log).with_suffix(".pid").write_text(str(own_number()))
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        # C code writes to standard error before it aborts.
        os.dup2(self._log, 2)
        faulthandler.enable(self._log, all_threads=False)
        self._interrupted = False
        signal.signal(signal.SIGINT, self._interrupt)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        """Empty the log and start the second timer."""
        self._empty_log()
        faulthandler.dump_traceback_later(self._timeout + _GRACE, exit=True, file=self._log)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self) -> Generator[None, object, object]:
        """Log standard error, because pytest's capture dies with the process; only SIGINT interrupts the run."""
        os.dup2(self._log, 2)
        try:
            with time_limit(self._timeout):
                return (yield)
        except KeyboardInterrupt:
            if self._interrupted:
                raise
            raise ConformanceError("raised KeyboardInterrupt") from None
        except Exception as problem:
            self._end_without_gpu(problem)
            raise

    def _end_without_gpu(self, problem: Exception) -> None:
        """End the process if an error of a kernel has made the GPU unusable for it."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            self._empty_log()
            os.write(self._log, f"{GPU_LOST}{type(problem).__name__}: {problem}".encode())
            os._exit(1)

    def _empty_log(self) -> None:
        os.ftruncate(self._log, 0)
        os.lseek(self._log, 0, os.SEEK_SET)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        signal.default_int_handler(number, frame)


def _limit_memory(limit: int) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # this system has no such limit
        import resource

        # The limit counts data, not address space: libraries map far more than they use.
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
