"""Child processes: they end with their parent, and take their own children with them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent is killed; Linux alone can."""
    # The Python of a virtual environment on Windows is a child of another process than the one that started it.
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill a child that leads a process group, such as one of a new session, with the children that it has."""
    # Windows has no killpg.
    if hasattr(os, "killpg"):
        # The thread that waits for it may have seen its end meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    else:
        child.kill()
    child.wait()


def signal_name(number: int) -> str:
    """The name of a signal; real-time signals have numbers without names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
