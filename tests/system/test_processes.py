"""Child processes import nothing of the current folder, and leave no process behind, however they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnplug._system.processes import (
    end,
    end_with,
    own_number,
    python_command,
    signal_name,
    start_python,
    supervised,
)
from attnplug._system.supervisor import SUPERVISOR

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="Linux alone can find the orphans of a process"
)
STARTS = """
import os, subprocess
started = [
    subprocess.Popen(['sleep', '600']).pid,
    subprocess.Popen(['sleep', '600'], start_new_session=True).pid,
    subprocess.Popen(['sh', '-c', 'sleep 600 & echo $!; exec sleep 0'], stdout=subprocess.PIPE).stdout.readline(),
]
reading, writing = os.pipe()
if os.fork() == 0:
    os.setsid()
    if child := os.fork():
        os.write(writing, b'%d' % child)
        os._exit(0)
    os.closerange(0, 20)
    os.execve('/bin/sleep', ['sleep', '600'], {})
started.append(os.read(reading, 20))
with open(sys.argv[1] + '.new', 'w') as file:
    file.write(' '.join(str(int(each)) for each in started))
os.rename(sys.argv[1] + '.new', sys.argv[1])
"""


def is_alive(pid: str) -> bool:
    try:
        text = Path("/proc", pid, "stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def await_file(path: Path) -> list[str]:
    end_of_wait = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end_of_wait
        time.sleep(0.01)
    return path.read_text().split()


ENDS = {
    "in good order": ("", 0),
    "with a code": ("os._exit(7)", 7),
    "by a signal": ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
    "by an abort": ("os.abort()", -signal.SIGABRT),
    "by a real-time signal": ("os.kill(os.getpid(), 40)", -40),
    "never": ("import time; time.sleep(600)", None),
}


@pytest.mark.parametrize("how", ENDS)
def test_processes_that_a_child_has_started_end_with_it(tmp_path, how):
    code, status = ENDS[how]
    pids, log = tmp_path / "pids", tmp_path / "log"
    with log.open("wb") as output:
        child = start_python(STARTS + code, str(pids), stdout=output)
    started = await_file(pids)
    assert len(started) == 4
    if status is None:
        assert all(map(is_alive, started))
    else:
        assert child.wait(60) == status
    end(child)
    assert child.returncode is not None
    assert not any(map(is_alive, started)), log.read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_of_a_child_end_with_the_parent_of_it(tmp_path, number):
    """Also where the parent is killed, and can end nothing itself."""
    pids, log = tmp_path / "pids", tmp_path / "log"
    code = f"""
from attnplug._system.processes import start_python
import time
with open({str(log)!r}, 'wb') as output:
    start_python({STARTS + "import time; time.sleep(600)"!r}, {str(pids)!r}, stdout=output)
time.sleep(600)
"""
    parent = subprocess.Popen(python_command(code))
    started = await_file(pids)
    parent.send_signal(number)
    parent.wait(60)
    end_of_wait = time.monotonic() + 60
    while any(map(is_alive, started)):
        assert time.monotonic() < end_of_wait
        time.sleep(0.01)


def test_a_child_reads_to_the_end_of_its_input_and_of_nothing(tmp_path):
    log = tmp_path / "log"
    code = "print(repr(sys.stdin.read()), sys.argv)"
    with log.open("wb") as output:
        child = start_python(code, "a b", "\ud800".encode("unicode_escape").decode(), stdout=output)
    assert child.wait(60) == 0
    assert log.read_text() == "'' ['-c', 'a b', '\\\\ud800']\n"


@pytest.mark.parametrize("name", ["json", "sys", "io", "os", "ctypes", "attnplug", "statistics"])
def test_a_child_imports_no_file_of_the_current_folder(tmp_path, monkeypatch, name):
    tmp_path.joinpath(f"{name}.py").write_text("raise SystemExit('from the current folder')")
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "log"
    with log.open("wb") as output:
        child = start_python("import json, io, os, ctypes, statistics, attnplug.core.device", stdout=output)
    assert (child.wait(60), log.read_text()) == (0, "")


def test_a_child_has_the_import_path_of_this_process(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "it's \udcff"))
    log = tmp_path / "log"
    with log.open("wb") as output:
        child = start_python("print(ascii(sys.path))", stdout=output)
    assert child.wait(60) == 0
    assert log.read_text().strip() == ascii([str(Path(each).absolute()) for each in sys.path])


def test_a_child_that_is_ended_again_stays_ended(tmp_path):
    with (tmp_path / "log").open("wb") as output:
        child = start_python("", stdout=output)
    assert child.wait(60) == 0
    end(child)
    end(child)
    assert child.returncode == 0


def test_the_environment_names_the_supervisor_that_the_parent_sees(tmp_path):
    log = tmp_path / "log"
    code = "from attnplug._system.processes import own_number; print(own_number())"
    with log.open("wb") as output:
        child = start_python(code, stdout=output)
    assert child.wait(60) == 0
    assert int(log.read_text()) == child.pid
    assert os.getpid() != child.pid


def test_a_child_that_hangs_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("attnplug._system.processes._SECONDS_TO_END", 0.01)
    ready, log = tmp_path / "ready", tmp_path / "log"
    with log.open("wb") as output:
        child = start_python(
            "import time; open(sys.argv[1], 'w'); time.sleep(600)", str(ready), stdout=output
        )
    await_file(ready)
    # A supervisor that is stopped does not even see the signal to end.
    os.kill(child.pid, signal.SIGSTOP)
    end(child)
    assert child.returncode == -signal.SIGKILL


def test_without_groups_of_processes_the_child_alone_is_killed(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(os, "killpg")
    child = subprocess.Popen(["sleep", "600"])
    end(child)
    assert child.returncode == -signal.SIGKILL
    end(child)


def test_another_system_runs_the_command_itself(monkeypatch):
    assert supervised(["a", "b"])[-3:] == [str(os.getpid()), "a", "b"]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert supervised(["a", "b"]) == ["a", "b"]
    assert end_with(1) is None


def test_only_the_supervisor_that_is_the_parent_counts(monkeypatch):
    monkeypatch.delenv(SUPERVISOR, raising=False)
    assert own_number() == os.getpid()
    monkeypatch.setenv(SUPERVISOR, str(os.getppid()))
    assert own_number() == os.getppid()
    # A grandchild inherits the variable, and is no child of the supervisor.
    monkeypatch.setenv(SUPERVISOR, "1234567")
    assert own_number() == os.getpid()


def test_a_signal_without_a_name_has_its_number():
    assert [signal_name(number) for number in (9, 15, 40)] == ["SIGKILL", "SIGTERM", "signal 40"]
