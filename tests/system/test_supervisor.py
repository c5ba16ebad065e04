"""The supervisor ends as its command ends, and takes all that the command has started along.

Each test calls it in a fork of this process, as it kills every child of the process that runs it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from attnplug._system import processes, supervisor

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="Linux alone can find the orphans of a process"
)
NEVER = "exec sleep 600"


def forked(call: Callable[[], object]) -> int:
    """The process id of a fork that calls `call`; it ends with 99 if that returns or raises."""
    child = os.fork()
    if child == 0:
        try:
            # Whatever this process ignores, as one that a shell has put into the background does.
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            call()
        finally:
            os._exit(99)
    return child


def supervised(line: str, parent: int | None = None) -> int:
    return forked(
        lambda: supervisor.main(os.getppid() if parent is None else parent, ["/bin/sh", "-c", line])
    )


def code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def is_alive(pid: int) -> bool:
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def awaited(path: Path) -> list[int]:
    end = time.monotonic() + 60
    while not path.exists() or not path.read_text().endswith("\n"):
        assert time.monotonic() < end
        time.sleep(0.005)
    return [int(word) for word in path.read_text().split()]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("exit 0", 0),
        ("exit 7", 7),
        ("kill -9 $$", -signal.SIGKILL),
        ("kill -TERM $$", -signal.SIGTERM),
        ("kill -40 $$", -40),
    ],
)
def test_it_ends_as_its_command_does(line, code):
    assert code_of(supervised(line)) == code


def test_a_command_that_is_missing_is_told_as_a_shell_tells_it():
    assert code_of(forked(lambda: supervisor.main(os.getppid(), ["/no/such/command"]))) == 127


def test_the_command_is_not_run_for_a_parent_that_has_ended(tmp_path):
    assert code_of(supervised(f"echo > {tmp_path}/ran", parent=1)) == 1
    assert not (tmp_path / "ran").exists()


def test_the_command_is_told_its_supervisor(tmp_path):
    child = supervised(f"echo ${supervisor.SUPERVISOR} $PPID > {tmp_path}/told")
    assert code_of(child) == 0
    assert awaited(tmp_path / "told") == [child, child]


def test_orphans_are_killed_when_the_command_ends(tmp_path):
    # The second one is of a session of its own, and the third has a child that nobody knows.
    line = f"sleep 600 & echo $! > {tmp_path}/a; setsid sh -c 'echo $$ > {tmp_path}/b; {NEVER}' & "
    line += f"(sh -c 'sleep 600 & echo $! > {tmp_path}/c; wait' &); while [ ! -s {tmp_path}/b -o ! -s {tmp_path}/c ]; do :; done; exit 3"
    assert code_of(supervised(line)) == 3
    for name in "abc":
        (pid,) = awaited(tmp_path / name)
        assert not is_alive(pid)


def test_the_signal_to_end_ends_all(tmp_path):
    child = supervised(f"sleep 600 & echo $$ $! > {tmp_path}/pids; wait")
    pids = awaited(tmp_path / "pids")
    assert all(map(is_alive, pids))
    os.kill(child, signal.SIGTERM)
    assert code_of(child) == -signal.SIGTERM
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGHUP])
def test_signals_of_a_terminal_are_the_affair_of_the_command(tmp_path, number):
    child = supervised(
        f"trap 'exit 5' {number.name[3:]}; echo $$ > {tmp_path}/pid; while :; do sleep 0.01; done"
    )
    (command,) = awaited(tmp_path / "pid")
    os.kill(child, number)
    assert is_alive(child)
    os.kill(command, number)
    assert code_of(child) == 5


def test_the_other_end_of_a_pipe_sees_that_the_command_has_closed_its_own():
    reading, writing = os.pipe()

    def call() -> None:
        os.dup2(writing, 1)
        os.close(writing)
        supervisor.main(os.getppid(), ["/bin/sh", "-c", f"echo said; exec >&-; {NEVER}"])

    child = forked(call)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"said\n"
    os.kill(child, signal.SIGTERM)
    assert code_of(child) == -signal.SIGTERM


def test_children_are_found_whatever_their_programs_are_called(tmp_path):
    name = tmp_path / "a) (b 1"
    name.symlink_to("/bin/sleep")
    with subprocess.Popen([name, "600"]) as child:
        try:
            assert child.pid in supervisor._children()
            assert os.getppid() not in supervisor._children()
            assert os.getpid() not in supervisor._children()
        finally:
            child.kill()


class Left(Exception):
    """How `_leave` would have ended this process."""


@pytest.mark.parametrize(
    ("status", "number"), [(None, signal.SIGTERM), (signal.SIGKILL, signal.SIGKILL), (40, 40), (3 << 8, None)]
)
def test_the_end_of_a_command_is_repeated(monkeypatch, status, number):
    sent = []

    def leave(code: int) -> None:
        raise Left(code)

    with monkeypatch.context() as patch:
        patch.setattr(os, "_exit", leave)
        patch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
        patch.setattr(signal, "pthread_sigmask", lambda how, numbers: sent.append((how, numbers)))
        patch.setattr(signal, "signal", lambda number, handler: sent.append((number, handler)))
        with contextlib.suppress(ImportError):
            import resource

            patch.setattr(resource, "setrlimit", lambda kind, limits: sent.append((kind, limits)))
        with pytest.raises(Left) as left:
            supervisor._leave(status)
    if number is None:
        assert (left.value.args, sent) == ((3,), [])
        return
    # A process that survives its own signal, such as the first one of a container, ends as a shell would say it.
    assert left.value.args == (128 + number,)
    assert sent == [
        (resource.RLIMIT_CORE, (0, 0)),
        (number, signal.SIG_DFL),
        (signal.SIG_UNBLOCK, [number]),
        (os.getpid(), number),
    ]


def test_a_process_ends_with_its_parent_and_not_under_another():
    assert code_of(forked(lambda: (processes.end_with(os.getppid()), os._exit(4)))) == 4
    assert code_of(forked(lambda: (processes.end_with(1), os._exit(4)))) == 1


def test_the_kernel_kills_a_process_whose_parent_is_killed(tmp_path):
    def parent() -> None:
        me = os.getpid()
        if os.fork() == 0:
            processes.end_with(me)
            (tmp_path / "pid").write_text(f"{os.getpid()}\n")
            time.sleep(600)
        time.sleep(600)

    child = forked(parent)
    (pid,) = awaited(tmp_path / "pid")
    os.kill(child, signal.SIGKILL)
    assert code_of(child) == -signal.SIGKILL
    end = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < end
        time.sleep(0.005)
