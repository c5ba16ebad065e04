"""Child processes. They import nothing of the current folder, end with their parent, and take their children along.

`Child` is the only place of attnplug that starts one, apart from the workers that pytest-xdist starts by `supervised`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from attnplug._system import files, supervisor

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


class Child:
    """A process under supervision. The end of a `with` block ends it and all that it has started, and removes its files.

    It finds an empty standard input, and writes its output to a file: a process that outlives its parent would keep a
    pipe open.

    Args:
        command: such as `python_command` gives.
        task: written as JSON to a file whose path is added to the command. The path of an empty file `report` follows.
        env: the environment, if it is not that of this process.
    """

    def __init__(
        self, command: Sequence[str], task: object = None, env: Mapping[str, str] | None = None
    ) -> None:
        self._folder = files.temporary_folder("attnplug-child-")
        self.report, self._log, given = (Path(self._folder.name, name) for name in ("report", "log", "task"))
        if task is not None:
            given.write_text(json.dumps(task), encoding="utf-8")
            self.report.touch()
            command = [*command, str(given), str(self.report)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  (the commands of our own modules)
                supervised(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env,
                # A group of its own, so that signals of the terminal go to this process alone.
                start_new_session=True,
            )
        _running.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.end()
        self._folder.cleanup()

    @property
    def is_over(self) -> bool:
        """Whether the child has ended by now."""
        return self._process.poll() is not None

    def wait(self, seconds: float) -> int | None:
        """The exit code, negative for a signal; None if the child ran longer than `seconds`, and was ended."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.end()

    def problem(self, seconds: float) -> str | None:
        """Why the child did not end in good order within `seconds`, such as "crashed: SIGSEGV"; None if it did."""
        code = self.wait(seconds)
        if code is None:
            return f"took longer than {seconds:g} s"
        if code < 0:
            return f"crashed: {signal_name(-code)}"
        return f"failed: {self.last_line()}" if code else None

    def last_line(self) -> str:
        """The last line of the output; the exit code if there is none."""
        lines = self.output().splitlines()
        return lines[-1] if lines else f"the process left with exit code {self._process.returncode}"

    def output(self) -> str:
        """The end of what the child has printed, without blanks around it."""
        return files.read_tail(self._log).decode(errors="replace").strip()

    def end(self) -> None:
        """End the child if it still runs, and all that it has started."""
        _running.discard(self)
        child = self._process
        if not self.is_over and sys.platform == "linux":
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


_running: set[Child] = set()


def end_children() -> None:
    """End the children of all threads, after an interrupt."""
    for child in list(_running):
        child.end()


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
