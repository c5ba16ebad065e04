"""Why a worker process died: read from the log that it leaves, else from its exit status."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sysconfig
import time
from pathlib import Path

from attnplug._system.processes import signal_name

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
