"""The pytest plugin of a worker process: its limits of memory and time, and a log that outlives it.

Why a worker process died: read from the log that it leaves, else from its exit status.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import itertools
import os
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType

import pytest

from attnplug._system.processes import own_number, signal_name
from attnplug.testing.conformance.check import ConformanceError, time_limit
from attnplug.testing.plugin import SHRINK, SUITE

GPU_LOST = "the GPU's context was lost: "
"""The first words in the log of a worker that ends because it can no longer use its GPU."""

_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_STACK = re.compile(r"^(?:Current thread 0x|Thread 0x|Stack \().*\n", re.MULTILINE)
_NO_MEMORY = ("bad_alloc", "can't allocate memory", "Cannot allocate memory", "MemoryError", "out of memory")
_EXIT_SECONDS = 10.0


def cause_of_death(log: Path, timeout: float) -> tuple[str, str]:
    """The cause in one line, and the part of the log that explains it.

    The log has the standard error of the check and faulthandler's report; a file of the same name that ends in
    ".pid" has the process id. A check may take `timeout` seconds.
    """
    text = ""
    with contextlib.suppress(OSError):
        text = log.read_text(encoding="utf-8", errors="replace")
    if text.startswith(GPU_LOST):
        return text.partition("\n")[0], text
    before, *stacks = _STACK.split(text)
    lines = before.strip().splitlines()
    # faulthandler writes the main thread last.
    stack = list(itertools.takewhile(_is_of_the_check, stacks[-1].splitlines())) if stacks else []
    detail = "\n".join([*lines, *stack])
    if any(line.startswith("Timeout (") for line in lines):
        return f"timed out after {timeout:g} s{_where(stack)}", detail
    short = next((line for line in lines if any(words in line for words in _NO_MEMORY)), None)
    if short is not None:
        return f"out of memory: {short.strip()}", detail
    for index, line in enumerate(lines):
        if line.startswith("Fatal Python error: "):
            # C++ describes an uncaught exception in the line before.
            last = [line.strip() for line in lines[:index] if line.strip()][-1:]
            what = ": ".join([line.removeprefix("Fatal Python error: "), *last])
            return f"the worker process crashed: {what}{_where(stack)}", detail
    return f"the worker process crashed{_exit_status(log.with_suffix('.pid'))}", detail


def _is_of_the_check(line: str) -> bool:
    """Whether a line of a stack is inside the test function; the lines outside are pytest's."""
    return line.startswith("  File ") and not line.endswith("in test_conformance")


def _where(stack: list[str]) -> str:
    """The innermost line of Python outside the standard library, such as " at impl.py:29, in attend"."""
    frames = [found for line in stack if (found := _FRAME.match(line))]
    library = sysconfig.get_path("stdlib")
    own = [f for f in frames if not f["path"].startswith(library) or "site-packages" in f["path"]]
    frame = next(iter([*own, *frames]), None)
    return f" at {frame['path']}:{frame['line']}, in {frame['name']}" if frame else ""


def _exit_status(pid: Path) -> str:
    """The end of the process, such as ": SIGKILL"; "" if the system does not report it."""
    # AttributeError: macOS has os.waitid from Python 3.13 on. WNOWAIT leaves the process for execnet to wait for.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        number, end = int(pid.read_text()), time.monotonic() + _EXIT_SECONDS
        ended = None
        while ended is None and time.monotonic() < end:
            ended = os.waitid(os.P_PID, number, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            time.sleep(0.01)
        if ended is not None and ended.si_code == os.CLD_EXITED:
            return f": it left with exit code {ended.si_status}"
        if ended is not None:
            name = signal_name(ended.si_status)
            return f": {name}" + (", as when the system runs out of memory" if name == "SIGKILL" else "")
    return ""


SETTINGS = "attnplug"
"""The key of a worker's input for its settings, which `run.run_checks` lists."""

# Seconds that pytest-timeout, which leaves the worker alive, comes before the end of the process.
_GRACE = 2.0


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
    config.stash[SHRINK] = settings["shrink"]
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
