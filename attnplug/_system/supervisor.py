"""Runs a command as a child, and ends with it all processes that it has started, also those in groups of their own.

Run as a script, `python supervisor.py PARENT COMMAND...`, so that nothing of a package or folder is imported. Linux only:
this process becomes the parent of all orphans below it, which are then found and killed. It ends as the command ends:
with its exit code, or by its signal. SIGTERM, and the end of the process PARENT, end all.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import NoReturn

SUPERVISOR = "_ATTNPLUG_SUPERVISOR"
"""Tells the command the process id of its supervisor, whose end its parent sees."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# A process that is killed may need some seconds, such as to give back the memory of a GPU.
_SECONDS = 10.0
_POLL = 0.002
_WATCHED = {signal.SIGCHLD, signal.SIGTERM}
# They go to the command too, which decides what they mean.
_OF_TERMINALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


def main(parent: int, command: list[str]) -> NoReturn:
    """Run `command` until it ends, and leave as it did."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    # The kernel gives no status of children to a process that ignores this signal.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.environ[SUPERVISOR] = str(supervisor)
        try:
            os.execv(command[0], command)  # noqa: S606  (the command of our own parent)
        finally:
            os._exit(127)
    for number in _OF_TERMINALS:
        signal.signal(number, signal.SIG_IGN)
    # The other end of a pipe must see when the command closes its own.
    for handle in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.close(handle)
    status = _wait(child)
    _end_all()
    _leave(status)


def _wait(child: int) -> int | None:
    """The status of the command when it ends; None after SIGTERM. Orphans that end are forgotten."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == child:
            return status
        if not ended and signal.sigwait(_WATCHED) == signal.SIGTERM:
            return None


def _end_all() -> None:
    """Kill all children until there are none; the children of each become children of this process when it has ended."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for child in _children():
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        time.sleep(_POLL)


def _children() -> list[int]:
    own, found = os.getpid(), []
    with os.scandir("/proc") as entries:
        numbers = [int(entry.name) for entry in entries if entry.name.isdigit()]
    for number in numbers:
        # A process may have ended meanwhile.
        with contextlib.suppress(OSError):
            handle = os.open(f"/proc/{number}/stat", os.O_RDONLY)
            # The name of a program may contain blanks and parentheses.
            if int(os.read(handle, 4096).rpartition(b")")[2].split()[1]) == own:
                found.append(number)
            os.close(handle)
    return found


def _leave(status: int | None) -> NoReturn:
    code = -signal.SIGTERM if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        # Without a second core dump.
        with contextlib.suppress(ImportError, ValueError, OSError):
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(os.getpid(), -code)
        code = 128 - code
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
