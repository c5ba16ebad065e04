"""Plugins that fork, wait, or write without an end while they are imported or asked: commands end, with one document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnplug.registry.plugins.records import ENTRY_POINT_GROUP

pytestmark = pytest.mark.attack("fork or wait")

SOUND = """
import concurrent.futures, itertools, os, sys, threading, time
from attnplug import AttentionBackend, hookimpl
from attnplug.backends.torch_native import TorchBackend
ATTNPLUG_API = (1, 1)
class B(AttentionBackend):
    device_types = ("cpu",)
    supported_dtypes = ("float16", "bfloat16", "float32")
    @staticmethod
    def get_name(): return "MINE"
    @classmethod
    def get_priority(cls, spec, device, phase): return 900
    @classmethod
    def get_impl_cls(cls): return TorchBackend.get_impl_cls()
    @classmethod
    def get_builder_cls(cls): return TorchBackend.get_builder_cls()
@hookimpl
def attnplug_backends(): return [B]
def ask():
    import attnplug
    try:
        attnplug.explain(attnplug.LayerSpec(num_heads=1, num_kv_heads=1, head_size=16), "cpu")
    except attnplug.errors.PluginError:
        pass
"""
FORKS = {
    "fork": "os.fork()",
    "fork twice": "os.fork(); os.fork()",
    "child exits": "os.fork() or sys.exit(0)",
    "child raises": "if os.fork() == 0: raise RuntimeError('child')",
    "child interrupts": "if os.fork() == 0: raise KeyboardInterrupt",
    "child prints": "if os.fork() == 0: sys.exit('{}')",
    "fork in a hook": "B.get_name = staticmethod(lambda: 'MINE' if os.fork() else sys.exit(0))",
    "fork in the priority": "B.get_priority = classmethod(lambda cls, *asked: 900 + 0 * os.fork())",
    "fork in the answer": "B.supports_head_size = classmethod(lambda cls, size: os.fork() >= 0)",
    "fork in a thread": "t = threading.Thread(target=os.fork); t.start(); t.join()",
}
WAITS = {
    "join": "t = threading.Thread(target=ask); t.start(); t.join()",
    "daemon": "t = threading.Thread(target=ask, daemon=True); t.start(); t.join()",
    "two threads": "ts = [threading.Thread(target=ask) for _ in range(2)]\nfor t in ts: t.start()\nfor t in ts: t.join()",
    "in a hook": (
        "asked = []\ndef name():\n    if not asked:\n        asked.append(1)\n"
        "        t = threading.Thread(target=ask); t.start(); t.join()\n    return 'MINE'\n"
        "B.get_name = staticmethod(name)"
    ),
}
SLOW_WAITS = {
    "pool": "with concurrent.futures.ThreadPoolExecutor() as pool: pool.submit(ask).result()",
    "event": "e = threading.Event(); threading.Thread(target=lambda: (ask(), e.set())).start(); e.wait()",
}


@pytest.fixture
def run(tmp_path: Path):
    """Writes a plugin with some code behind a sound class, and runs a command beside it."""

    def command(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "mine.py").write_text(SOUND + code)
        info = tmp_path / "mine-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\nmine = mine\n")
        here = str(Path(__file__).parents[2])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), here))}
        environment |= {
            "ATTNPLUG_PLUGINS": "mine,attnplug",
            "ATTNPLUG_BLOCK_PLUGINS": "triton,flash_attn,flashinfer,flash_mla",
        }
        whole = [sys.executable, *(arguments if arguments[0] == "-c" else ("-m", "attnplug", *arguments))]
        return subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=100)

    return command


EXPLAIN = ("explain", "--head-size", "64", "--device", "cpu", "--json")


# A fork of each place where a plugin is asked, and each end of a child.
QUICK_FORKS = ("fork", "child exits", "child prints", "fork in a hook", "fork in the answer")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK_FORKS)) for kind in FORKS],
)
def test_a_fork_of_a_plugin_prints_no_second_document(run, kind: str) -> None:
    done = run(FORKS[kind], *EXPLAIN)
    assert done.returncode == 0, done.stderr
    # json refuses text behind the first document.
    assert json.loads(done.stdout)["backend"] == "MINE"


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUICK_FORKS)
def test_a_fork_of_a_plugin_lists_no_second_time(run, kind: str) -> None:
    done = run(FORKS[kind], "list", "--json")
    assert done.returncode == 0, done.stderr
    assert {row["name"] for row in json.loads(done.stdout)["backends"]} == {"MINE", "TORCH"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "two threads")) for kind in WAITS]
)
def test_an_import_that_joins_a_thread_that_asks_the_registry_ends(run, kind: str) -> None:
    done = run(WAITS[kind], *EXPLAIN)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["backend"] == "MINE"


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLOW_WAITS)
def test_an_import_that_waits_otherwise_for_such_a_thread_ends_too(run, kind: str) -> None:
    done = run(SLOW_WAITS[kind], *EXPLAIN)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["backend"] == "MINE"


@pytest.mark.parametrize("kind", ["join", "two threads"])
def test_a_program_that_imports_such_a_plugin_itself_goes_on(run, kind: str) -> None:
    program = "import mine, attnplug; print(*sorted(attnplug.registry.list_backends()))"
    done = run(WAITS[kind], "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "MINE TORCH\n"


def test_parts_whose_import_joins_a_thread_that_selects_are_imported(run) -> None:
    code = """
def parts(cls):
    def choose():
        import attnplug
        spec = attnplug.LayerSpec(num_heads=1, num_kv_heads=1, head_size=16)
        levels.append(attnplug.select(spec, "cpu").level)
    t = threading.Thread(target=choose); t.start(); t.join()
    return TorchBackend.get_impl_cls()
levels = []
B.get_impl_cls = classmethod(parts)
"""
    program = (
        "import attnplug; spec = attnplug.LayerSpec(num_heads=2, num_kv_heads=2, head_size=16)\n"
        "chosen = attnplug.select(spec, 'cpu')\nimport mine; print(chosen.backend, chosen.level, *mine.levels)"
    )
    done = run(code, "-c", program)
    assert done.stdout == "MINE usable declared\n", done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "raise RuntimeError('x' * 5_000_000)",
        "B.validate_configuration = classmethod(lambda cls, *asked: ['x' * 5_000_000])",
        "B.__doc__ = 'x' * 5_000_000",
        "B.requires = ('x' * 5_000_000,)",
        "B.get_supported_kernel_block_sizes = classmethod(lambda cls, *asked: itertools.count(16))",
        "B.get_supported_head_sizes = classmethod(lambda cls: (time.sleep(3600) for _ in range(2)))",
        "B.device_types = itertools.count()",
    ],
)
def test_no_text_and_no_sequence_is_without_an_end(run, code: str) -> None:
    done = run(code, *EXPLAIN)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) < 60_000
    assert json.loads(done.stdout)["backend"] in ("MINE", "TORCH")


STAYS = {
    "thread": "threading.Thread(target=time.sleep, args=(90,)).start()",
    "busy thread": (
        "def spin():\n    end = time.time() + 90\n    while time.time() < end: time.sleep(0.01)\n"
        "threading.Thread(target=spin).start()"
    ),
    "pool": "concurrent.futures.ThreadPoolExecutor().submit(time.sleep, 90)",
    "thread of a thread": (
        "def begin(): threading.Thread(target=time.sleep, args=(90,)).start()\n"
        "threading.Thread(target=begin).start()"
    ),
    "at exit": "import atexit; atexit.register(time.sleep, 90)",
}


# What is registered for the exit of Python ends the command after ten seconds, in which it only waits.
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in ("thread", "pool"))) for kind in STAYS],
)
def test_a_thread_that_a_plugin_leaves_keeps_no_command(run, kind: str) -> None:
    begun = time.monotonic()
    done = run(STAYS[kind], *EXPLAIN)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["backend"] == "MINE"
    assert time.monotonic() - begun < 60


def test_a_command_that_fails_keeps_its_exit_code_beside_such_a_thread(run) -> None:
    done = run(STAYS["thread"], "explain", "--head-size", "64", "--device", "nowhere")
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    done = run(STAYS["thread"], "list")
    assert "MINE" in done.stdout


@pytest.mark.slow
def test_a_doctor_does_not_wait_for_such_a_thread(run) -> None:
    done = run(STAYS["thread"], "doctor", "MINE", "--timeout", "50", "--json")
    (found,) = [each for each in json.loads(done.stdout)["findings"] if each["what"].startswith("MINE")]
    assert found["state"] == "ok", found
