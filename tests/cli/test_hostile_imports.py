"""A plugin that prints or ends the process when it is imported neither spoils nor empties a command's output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="a command is watched on Linux only"),
    pytest.mark.slow,  # each test starts processes
]

PLUGIN = """
{at_import}
from attnplug import AttentionBackend, hookimpl

ATTNPLUG_API = (1, 1)


class Noisy(AttentionBackend):
    device_types = ("cpu",)
    supported_dtypes = ("float32", "bfloat16")

    @staticmethod
    def get_name():
        return "NOISY"

    @classmethod
    def get_priority(cls, spec, device, phase=None):
        {in_priority}
        return 5

    @classmethod
    def get_impl_cls(cls):
        {in_parts}
        from attnplug.backends.torch_native.backend import TorchBackend
        return TorchBackend.get_impl_cls()

    @classmethod
    def get_builder_cls(cls):
        from attnplug.backends.torch_native.backend import TorchBackend
        return TorchBackend.get_builder_cls()


@hookimpl
def attnplug_backends():
    return [Noisy]
"""
PRINTS = """
import atexit, ctypes, os, subprocess, sys, threading
print("print"); sys.stdout.write("write"); sys.__stdout__.write("original"); os.write(1, b"descriptor")
ctypes.CDLL(None).printf(b"C without a flush")
subprocess.run([sys.executable, "-S", "-c", "print('child')"])
atexit.register(print, "at exit")
atexit.register(os.write, 1, b"at exit too")
threading.Thread(target=print, args=("thread",)).start()
"""
LAYER = ("--device", "cpu", "--dtype", "float32")
COMMANDS = {
    "list": ("list", "--json"),
    "show": ("show", "NOISY", "--json"),
    "explain": ("explain", *LAYER, "--json"),
}


@pytest.fixture
def attnplug(tmp_path):
    """Run a command of attnplug beside a plugin with the given code."""

    def run(*arguments: str, at_import="", in_priority="pass", in_parts="pass", send=None):
        about = tmp_path / "noisy-1.0.dist-info"
        about.mkdir(exist_ok=True)
        about.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: noisy\nVersion: 1.0\n")
        about.joinpath("entry_points.txt").write_text("[attnplug.backends]\nloud = noisy_backend\n")
        text = PLUGIN.format(at_import=at_import, in_priority=in_priority, in_parts=in_parts)
        tmp_path.joinpath("noisy_backend.py").write_text(text)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ATTNPLUG_")}
        path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
        home = {"PYTHONPATH": path, "XDG_DATA_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
        # Each backend that doctor imports costs a process.
        home |= (
            {"ATTNPLUG_BLOCK_PLUGINS": "flash_attn,flash_mla,flashinfer,triton"}
            if "doctor" in arguments
            else {}
        )
        child = subprocess.Popen(
            [sys.executable, "-m", "attnplug", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**kept, **home},
            cwd=tmp_path,
        )
        if send is not None:
            # The plugin writes a line when its import begins.
            assert child.stderr.readline() == "importing\n"
            child.send_signal(send)
        out, err = child.communicate(timeout=100)
        return subprocess.CompletedProcess(child.args, child.returncode, out, err)

    return run


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_prints_at_import_go_to_standard_error(attnplug, command):
    done = attnplug(*command, at_import=PRINTS)
    assert json.loads(done.stdout)
    assert done.returncode == 0
    told = ("print", "write", "original", "descriptor", "C without a flush", "child", "at exit", "thread")
    assert [each for each in told if each not in done.stderr] == []


def test_prints_of_a_priority_go_to_standard_error(attnplug):
    done = attnplug("list", "--json", in_priority='print("hello"); import os; os.write(1, b"there")')
    names = [row["name"] for row in json.loads(done.stdout)["backends"]]
    assert "NOISY" in names
    assert "hello" in done.stderr


def test_a_plugin_that_closes_standard_output_closes_its_own(attnplug):
    done = attnplug("list", "--json", at_import="import os, sys; sys.stdout.close(); os.close(1)")
    assert json.loads(done.stdout)["backends"]


EXITS = {
    "os._exit": "import os; os._exit(0)",
    "C": "import ctypes; ctypes.CDLL(None)._exit(0)",
    "exec": "import os; os.execv('/bin/true', ['true'])",
    "thread": "import os, threading, time; threading.Thread(target=os._exit, args=(0,)).start(); time.sleep(9)",
}


@pytest.mark.parametrize("how", EXITS.values(), ids=EXITS)
def test_a_plugin_that_ends_the_process_at_import_is_named(attnplug, how):
    done = attnplug("list", "--json", at_import=how)
    assert (done.returncode, done.stdout) == (1, "")
    assert "ended with exit code 0 while it imported the plugin noisy:loud" in done.stderr
    assert "attnplug doctor" in done.stderr


@pytest.mark.parametrize("command", [("show", "TORCH"), ("explain", *LAYER), ("matrix", "--device", "cpu")])
def test_every_command_fails_where_a_plugin_ends_the_process(attnplug, command):
    done = attnplug(*command, at_import=EXITS["os._exit"])
    assert (done.returncode, done.stdout) == (1, "")
    assert "noisy:loud" in done.stderr


def test_a_crash_at_import_is_named(attnplug):
    done = attnplug("list", at_import="import os; os.abort()")
    assert done.returncode == 128 + signal.SIGABRT
    assert "by SIGABRT while it imported the plugin noisy:loud" in done.stderr


def test_a_backend_that_ends_the_process_in_a_query_is_named(attnplug):
    done = attnplug("explain", *LAYER, "--json", in_priority="import os; os._exit(0)")
    assert (done.returncode, done.stdout) == (1, "")
    assert "while it examined the backend NOISY" in done.stderr


def test_a_plugin_that_ends_the_process_at_its_exit_changes_no_code(attnplug):
    ends = "import atexit, os; atexit.register(os._exit, 0)"
    done = attnplug(
        "explain", *LAYER, "--head-size", "7", "--alibi", "--backend", "NOISY", "--json", at_import=ends
    )
    assert json.loads(done.stdout)["backend"] is None
    assert done.returncode == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_command(attnplug, number):
    waits = "import sys, time; print('importing', file=sys.stderr, flush=True); time.sleep(60)"
    done = attnplug("list", at_import=waits, send=number)
    assert done.returncode in (128 + number, 130)


def test_a_killed_command_leaves_no_process(attnplug):
    waits = "import sys, time; print('importing', file=sys.stderr, flush=True); time.sleep(60)"
    # `communicate` returns only when no process has the pipes open.
    assert attnplug("list", at_import=waits, send=signal.SIGKILL).returncode == -signal.SIGKILL


@pytest.mark.slow
def test_doctor_reports_a_plugin_that_ends_its_process(attnplug):
    done = attnplug("doctor", "--json", at_import=PRINTS + EXITS["os._exit"])
    states = {each["what"]: each["state"] for each in json.loads(done.stdout)["findings"]}
    assert (done.returncode, states["noisy:loud"]) == (1, "failed")


@pytest.mark.slow
def test_a_part_that_ends_the_process_is_named(attnplug, tmp_path):
    model = Path(__file__).parents[2] / "examples" / "models" / "llama-3.1-8b.json"
    done = attnplug(
        "select",
        str(model),
        "--device",
        "cpu",
        "--backend",
        "NOISY",
        "--json",
        in_parts="import os; os._exit(0)",
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "in get_impl_cls of noisy_backend.Noisy" in done.stderr


STARTS = """
import os, subprocess
for own in (False, True):
    process = subprocess.Popen(["sleep", "600"], start_new_session=own)
    with open({pids!r}, "a") as file:
        file.write(f"{{process.pid}}\\n")
"""


@pytest.mark.parametrize(
    "command",
    [
        ("doctor", "NOISY"),
        ("conformance", "NOISY", "--only", "declaration/light-*", "--jobs", "1"),
        ("matrix", "--verify", "--device", "cpu", "--backend", "NOISY", "--only", "plain/*/d64/*", "--jobs", "1"),
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_processes_that_a_part_starts_in_a_child_of_a_command_end_with_it(attnplug, command, tmp_path):
    """In groups of their own too. The command itself imports no part of a backend."""
    pids = tmp_path / "pids"
    code = f"exec({STARTS.format(pids=str(pids))!r})"
    attnplug(*command, in_parts=code)
    started = pids.read_text().split()
    assert len(started) >= 2
    for pid in started:
        try:
            text = Path("/proc", pid, "stat").read_text()
        except OSError:
            continue
        assert text.rpartition(")")[2].split()[0] in "ZX", command


@pytest.mark.parametrize(
    "code",
    [
        "raise OSError('libcudart.so.12: cannot open shared object file')",
        "import json; json.loads('libcudart.so.12')",
        "import libcudart",
    ],
    ids=["library", "code that it calls", "module"],
)
@pytest.mark.parametrize("command", [("matrix",), ("conformance", "TORCH", "--json")], ids=str)
def test_a_torch_that_cannot_be_imported_is_one_message(attnplug, tmp_path, command, code):
    tmp_path.joinpath("torch").mkdir()
    tmp_path.joinpath("torch", "__init__.py").write_text(code)
    done = attnplug(*command)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "attnplug: torch cannot be imported: " in done.stderr
    assert "repair it until python -c 'import torch' runs" in done.stderr
    if "--json" in command:
        assert json.loads(done.stdout)["schema"] == "attnplug.error"
