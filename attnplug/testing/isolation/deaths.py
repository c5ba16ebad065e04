"""Why a worker process died, from the log that outlives it."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable

__all__ = ["GPU_LOST", "cause_of_death"]

GPU_LOST = "the GPU's context was lost: "
"""What a worker writes first in its log where it ends since its GPU can no longer be used."""

_FRAME = re.compile(r'  File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_THREAD = re.compile(r"^(Current thread|Thread) 0x.*$", re.MULTILINE)
_NO_MEMORY = ("bad_alloc", "can't allocate memory", "Cannot allocate memory", "MemoryError", "out of memory")
_OUTERMOST = "test_conformance"


def cause_of_death(said: str, timeout: float, exit_status: Callable[[], str]) -> tuple[str, str]:
    """The cause in one line, and what is worth reading of the log.

    Args:
        said: the log: what the check wrote to standard error, and faulthandler's report.
        timeout: seconds that a check may take.
        exit_status: how the process ended, as ": SIGKILL"; asked where the log does not say.
    """
    if said.startswith(GPU_LOST):
        return said.partition("\n")[0], said
    words, stack = _words_and_stack(said)
    detail = "\n".join([*words, *stack])
    if any(line.startswith("Timeout (") for line in words):
        return f"timed out after {timeout:g} s{_where(stack)}", detail
    short = next((line for line in words if any(text in line for text in _NO_MEMORY)), None)
    if short is not None:
        return f"out of memory: {short.strip()}", detail
    for index, line in enumerate(words):
        if line.startswith("Fatal Python error: "):
            # What C++ says of an exception that nobody caught stands before it.
            last = [line.strip() for line in words[:index] if line.strip()][-1:]
            how = ": ".join([line.removeprefix("Fatal Python error: "), *last])
            return f"the worker process crashed: {how}{_where(stack)}", detail
    return f"the worker process crashed{exit_status()}", detail


def _words_and_stack(said: str) -> tuple[list[str], list[str]]:
    """The lines before any stack, and the stack of the thread that crashed, else of the main one."""
    threads = list(_THREAD.finditer(said))
    if not threads:
        return said.strip().splitlines(), []
    # The main thread comes last.
    chosen = next((thread for thread in threads if thread[1] == "Current thread"), threads[-1])
    stack = []
    for line in said[chosen.end() :].lstrip("\n").splitlines():
        if not line.startswith("  File ") or line.endswith(f"in {_OUTERMOST}"):
            break
        stack.append(line)
    return said[: threads[0].start()].strip().splitlines(), stack


def _where(stack: list[str]) -> str:
    """The innermost line of Python that is not of the standard library, as " at impl.py:29, in attend"."""
    frames = [found for line in stack if (found := _FRAME.match(line))]
    library = sysconfig.get_path("stdlib")
    own = [f for f in frames if not f["path"].startswith(library) or "site-packages" in f["path"]]
    frame = next(iter([*own, *frames]), None)
    return f" at {frame['path']}:{frame['line']}, in {frame['name']}" if frame else ""
