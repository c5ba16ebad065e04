"""Runs the program in a child process, so that a plugin that ends the process cannot pass for a success.

Signals that end a long run.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from attnplug._system.processes import end_with, signal_name
from attnplug.cli.output.output import error
from attnplug.registry.plugins.waiting import watch_plugins

_FAILED, _INTERRUPTED = 1, 130
_SIZE = 1024
_SECONDS_FOR_THREADS = 0.5
_SECONDS_TO_END = 10.0
# Marks the code of an orderly end; no name of a plugin has this character.
_ENDED = b"\n"
_REMEDY = "attnplug doctor tries each plugin in a process of its own, and attnplug list --no-load runs none"
# Signals of the kernel, such as those of a terminal, have a code above this; the whole group has received them.
_SI_USER = 0


def can_watch() -> bool:
    """Whether a child can be forked and watched here: on Linux, before threads and torch."""
    is_linux = sys.platform == "linux" and hasattr(os, "fork")
    return is_linux and threading.active_count() == 1 and "torch" not in sys.modules


def hear_of_children() -> None:
    """Let the system report the end of children: one that inherits SIGCHLD as ignored would wait for ever."""
    if hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def run_watched(program: Callable[[], None]) -> NoReturn:
    """Run `program` in a child, and exit with its code; with an error if it did not end by itself."""
    parent = os.getpid()
    # Memory that both processes see. A pipe could fill up, and a plugin could close it.
    report = mmap.mmap(-1, _SIZE)
    # Blocked before the fork, so that a signal that comes before `_wait` is kept for it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED | {signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        end_with(parent)
        _run(program, report, before)
    _leave(_wait(child), report[:].rstrip(b"\x00"))


_FORWARDED = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}


def _run(program: Callable[[], None], report: mmap.mmap, signals: set[int]) -> NoReturn:
    def note(text: bytes) -> None:
        report[:] = text[:_SIZE].ljust(_SIZE, b"\x00")

    watch_plugins(lambda text: note(text.encode(errors="replace")))
    code: object = _FAILED
    is_told = True
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        program()
        code = 0
    except SystemExit as ended:
        code = ended.code
        raise
    except KeyboardInterrupt:
        code = _INTERRUPTED
        sys.exit(_INTERRUPTED)
    except BaseException:
        # Python prints the traceback later.
        is_told = False
        raise
    finally:
        # An interrupt while the interpreter ends would only print a traceback.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        number = code if isinstance(code, int) else _FAILED if code else 0
        note(_ENDED + str(number).encode())
        if is_told:
            leave_threads(code)
    sys.exit(0)


def leave_threads(code: object) -> None:
    """End the process with an exit code if a thread of a plugin would keep it, and else let it end by itself.

    The output is complete, so nothing waits for such a thread, nor for long for what a plugin does at the exit.
    """
    if not isinstance(code, (int, type(None))):
        return  # a message, which Python prints later

    def end() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit((code or 0) & 0xFF)

    others = [t for t in threading.enumerate() if not t.daemon and t is not threading.current_thread()]
    # Threads that are about to end do so, and the exit is then an orderly one.
    until = time.monotonic() + _SECONDS_FOR_THREADS
    for each in others:
        each.join(max(0, until - time.monotonic()))
    if any(each.is_alive() for each in others):
        end()
    last = threading.Timer(_SECONDS_TO_END, end)
    last.daemon = True
    with contextlib.suppress(RuntimeError):
        last.start()


def _wait(child: int) -> int:
    """The status of the child when it ends; signals sent to this process alone are sent on to it."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        found = signal.sigwaitinfo(_FORWARDED | {signal.SIGCHLD})
        if found.si_signo != signal.SIGCHLD and found.si_code <= _SI_USER:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, found.si_signo)


def _leave(status: int, last: bytes) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if last.startswith(_ENDED):
        orderly = int(last[1:])
        # A crash while the interpreter ends is a crash too.
        sys.exit(orderly if code >= 0 else 128 - code)
    step = last.decode(errors="replace")
    how = f"with exit code {code}" if code >= 0 else f"by {signal_name(-code)}"
    if -code in _FORWARDED:
        sys.exit(128 - code)
    error(f"the process was ended {how} {step or 'by code of a plugin'}; {_REMEDY}", _FAILED)
    sys.exit(_FAILED if code >= 0 else 128 - code)


# coreutils' timeout sends its signal to this process, and then to its process group. The second signal must not
# stop the first one's handling, which writes the results.
_SAME_SIGNAL_SECONDS = 1.0


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """SIGTERM interrupts as SIGINT does, and several signals at once are one interrupt."""
    last = -_SAME_SIGNAL_SECONDS

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SAME_SIGNAL_SECONDS:
            last = now
            raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
