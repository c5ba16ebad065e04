"""Child processes import nothing of the current folder, and leave no process behind, however they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import attnplug
from attnplug._system.processes import (
    Child,
    end_children,
    end_with,
    own_number,
    python_command,
    signal_name,
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
    pids = tmp_path / "pids"
    with Child(python_command(STARTS + code, str(pids))) as child:
        started = await_file(pids)
        assert len(started) == 4
        if status is None:
            assert all(map(is_alive, started))
            assert not child.is_over
        else:
            assert child.wait(60) == status
            assert not any(map(is_alive, started)), child.output()
    assert child.is_over
    assert not any(map(is_alive, started))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_processes_of_a_child_end_with_the_parent_of_it(tmp_path, number):
    """Also where the parent is killed, and can end nothing itself."""
    pids = tmp_path / "pids"
    code = f"""
from attnplug._system.processes import Child, python_command
import time
child = Child(python_command({STARTS + "import time; time.sleep(600)"!r}, {str(pids)!r}))
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


def test_a_child_reads_to_the_end_of_its_input_and_of_nothing():
    surrogate = "\ud800".encode("unicode_escape").decode()
    with Child(python_command("print(repr(sys.stdin.read()), sys.argv)", "a b", surrogate)) as child:
        assert child.wait(60) == 0
        assert child.output() == "'' ['-c', 'a b', '\\\\ud800']"


@pytest.mark.parametrize("name", ["json", "sys", "io", "os", "ctypes", "attnplug", "statistics"])
def test_a_child_imports_no_file_of_the_current_folder(tmp_path, monkeypatch, name):
    tmp_path.joinpath(f"{name}.py").write_text("raise SystemExit('from the current folder')")
    monkeypatch.chdir(tmp_path)
    code = "import json, io, os, ctypes, statistics, attnplug.core.device"
    with Child(python_command(code)) as child:
        assert (child.wait(60), child.output()) == (0, "")


def test_a_child_has_the_import_path_of_this_process(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "it's \udcff"))
    with Child(python_command("print(ascii(sys.path))")) as child:
        assert child.wait(60) == 0
        assert child.output() == ascii([str(Path(each).absolute()) for each in sys.path])


def test_a_child_reads_its_task_and_writes_a_report_which_are_removed():
    code = "import json; task, report = sys.argv[1:]; open(report, 'w').write(json.load(open(task))['text'])"
    with Child(
        python_command(code), {"text": "\ud800"}, {**os.environ, "PYTHONIOENCODING": "utf-8"}
    ) as child:
        assert "surrogates not allowed" in child.problem(60)
    with Child(python_command(code), {"text": "read"}) as child:
        assert child.problem(60) is None
        assert child.report.read_text() == "read"
    assert not child.report.parent.exists()


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("", None),
        ("print('a', flush=True); raise SystemExit('b')", "failed: b"),
        ("raise SystemExit(3)", "failed: the process left with exit code 3"),
        ("import os; os.abort()", "crashed: SIGABRT"),
        ("import time; time.sleep(600)", "took longer than 0.2 s"),
    ],
)
def test_a_child_says_why_it_did_not_end_in_good_order(code, problem):
    with Child(python_command(code)) as child:
        assert child.problem(0.2 if "sleep" in code else 60) == problem
        assert child.is_over


def test_only_the_end_of_a_long_output_is_read():
    with Child(python_command("print('x' * (1 << 21)); print('last')")) as child:
        assert child.wait(60) == 0
        assert child.last_line() == "last"
        assert len(child.output()) < 1 << 20


def test_an_interrupt_ends_the_children_of_all_threads():
    with Child(python_command("import time; time.sleep(600)")) as child:
        end_children()
        assert child.is_over


def test_nothing_else_in_the_package_starts_a_process():
    sources = Path(attnplug.__file__).parent.rglob("*.py")
    starts = re.compile(
        r"^\s*(import|from) subprocess|multiprocessing\.(Process|Pool)|os\.(system|popen|posix_spawn)\(", re.M
    )
    assert [path.name for path in sources if starts.search(path.read_text())] == ["processes.py"]


def test_the_environment_names_the_supervisor_that_the_parent_sees():
    code = "from attnplug._system.processes import own_number; print(own_number())"
    with Child(python_command(code)) as child:
        assert child.wait(60) == 0
        assert int(child.output()) == child._process.pid != os.getpid()


def test_a_child_that_hangs_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("attnplug._system.processes._SECONDS_TO_END", 0.01)
    ready = tmp_path / "ready"
    code = "import time; open(sys.argv[1], 'w'); time.sleep(600)"
    with Child(python_command(code, str(ready))) as child:
        await_file(ready)
        # A supervisor that is stopped does not even see the signal to end.
        os.kill(child._process.pid, signal.SIGSTOP)
        child.end()
        child.end()
        assert child._process.returncode == -signal.SIGKILL


def test_without_groups_of_processes_the_child_alone_is_killed(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(os, "killpg")
    with Child(["/bin/sleep", "600"]) as child:
        child.end()
        assert child._process.returncode == -signal.SIGKILL


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
