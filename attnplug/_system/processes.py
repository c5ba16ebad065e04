"""Child processes: they import nothing of the current folder, end with their parent, and take their children along."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from attnplug._system import supervisor

_PR_SET_PDEATHSIG = 1
_SECONDS_TO_END = 15.0
# The child gets the import path of this process before it imports anything but what is built in: -c would put the
# current folder first, and a file there may have the name of a module.
_CHILD = """
import sys
sys.path[:] = eval(sys.argv[1])
del sys.argv[1]
"""


def python_command(code: str, *arguments: str) -> list[str]:
    """The command of a child that runs `code` with the import path of this process; its `sys.argv[1:]` are `arguments`."""
    # As ASCII, because an argument of a process cannot contain every character of a folder's name.
    path = ascii([str(Path(each).absolute()) for each in sys.path if isinstance(each, str)])
    return [sys.executable, "-P", "-c", _CHILD + code, path, *arguments]


def supervised(command: Sequence[str]) -> list[str]:
    """The command that runs `command` and ends with it all that it has started; on Linux, else `command` itself."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", str(Path(supervisor.__file__)), str(os.getpid()), *command]


def start_python(
    code: str,
    *arguments: str,
    stdout: IO[Any],
    stdin: IO[Any] | int = subprocess.DEVNULL,
    stderr: IO[Any] | int = subprocess.STDOUT,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `python_command(code, *arguments)`, supervised.

    Output goes to a file, because a process that outlives its parent would keep a pipe open. A child that reads the
    standard input gets its end at once, and does not wait for the user.
    """
    return subprocess.Popen(  # noqa: S603  (our own interpreter on our own code)
        supervised(python_command(code, *arguments)),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=env,
        # A group of its own, so that signals of the terminal go to this process alone.
        start_new_session=True,
    )


def end(child: subprocess.Popen[bytes]) -> None:
    """End a child of `start_python` if it still runs, and all that it has started."""
    if child.poll() is None and sys.platform == "linux":
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_SECONDS_TO_END)
    # Without a supervisor, or if it hangs. Windows has no killpg.
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    elif child.returncode is None:
        child.kill()
    child.wait()


def own_number() -> int:
    """The process id whose end this process's parent sees: the supervisor's, if there is one."""
    number = os.getppid()
    return number if os.environ.get(supervisor.SUPERVISOR) == str(number) else os.getpid()


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


def signal_name(number: int) -> str:
    """The name of a signal; real-time signals have numbers without names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
