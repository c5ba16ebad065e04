"""`attnplug tune` as a user runs it, with backends planted that are wrong, crash, hang or are really fast."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from planted import plant

from attnplug.registry.measured.tuned import RowStatus
from attnplug.registry.measured.tuned_files import read_table

pytestmark = pytest.mark.slow

CONFIG = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 64, "vocab_size": 64,
    "sliding_window": 16, "sliding_window_pattern": 3, "query_pre_attn_scalar": 32, "torch_dtype": "bfloat16",
}  # fmt: skip
SHAPES = ("--workload", "decode 2 x 90, prefill 2 x 40")


class Machine:
    """A user with a model, planted plugins and data folders of its own."""

    def __init__(self, folder: Path) -> None:
        self.plugins, self.data = folder / "plugins", folder / "data"
        self.config, self.table = folder / "config.json", folder / "table.json"
        self.config.write_text(json.dumps(CONFIG))
        self.plugins.mkdir()

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.plugins), "XDG_DATA_HOME": str(self.data)}
        command = [sys.executable, "-m", "attnplug", *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    def python(self, code: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(self.plugins), "XDG_DATA_HOME": str(self.data)}
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=True
        )
        return done.stdout

    def tune(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        given = ("tune", self.config, "--device", "cpu", *SHAPES, "--output", self.table, *arguments)
        done = self.run(*given)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(self.plugins), "XDG_DATA_HOME": str(self.data)}
        command = [sys.executable, "-m", "attnplug", "tune", str(self.config), "--device", "cpu", *SHAPES]
        return subprocess.Popen(
            [*command, "--output", str(self.table)], env=environment, stderr=subprocess.DEVNULL
        )

    def chosen(self, *arguments: object) -> dict[str, Any]:
        done = self.run("select", self.config, "--device", "cpu", "--json", *arguments)
        assert done.returncode == 0, done.stderr
        return {each["layer_name"]: each for each in json.loads(done.stdout)["decisions"]}

    def statuses(self) -> dict[str, list[RowStatus]]:
        found: dict[str, list[RowStatus]] = {}
        for layer in read_table(self.table).layers:
            for row in layer.rows:
                found.setdefault(row.subject.backend, []).append(row.status)
        return found


def is_alive(pid: str) -> bool:
    try:
        text = Path("/proc", pid, "stat").read_text()
    except OSError:
        return False
    # Nobody may have asked for its exit code yet.
    return text.rpartition(")")[2].split()[0] not in "ZX"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_fast_backend_that_drops_the_window_is_never_chosen(machine: Machine) -> None:
    plant(machine.plugins, "FAST", priority=900, spec="spec.replace(window=(-1, -1))")
    before = machine.chosen("--no-tuned")
    assert {each["backend"] for each in before.values()} == {"FAST"}
    done = machine.tune()
    assert done.returncode == 4, done.stderr
    assert "FAST is wrong at decode 2 x 90: sliding_window ignored" in done.stderr
    statuses = machine.statuses()
    assert RowStatus.WRONG in statuses["FAST"]
    after = machine.chosen("--tuned", machine.table)
    windowed = {name: each for name, each in after.items() if each["spec"]["window"][0] >= 0}
    assert windowed
    assert {each["backend"] for each in windowed.values()} == {"TORCH"}
    refused = next(c for c in next(iter(windowed.values()))["candidates"] if c["name"] == "FAST")
    assert (refused["refused_at"], refused["reasons"][0]["code"]) == ("evidence", "refuted")
    # Remembered without the table too.
    assert next(iter(machine.chosen("--no-tuned").values()))["backend"] == "TORCH"


def test_a_backend_that_crashes_costs_a_row_and_the_others_are_measured(machine: Machine) -> None:
    plant(machine.plugins, "CRASHES", priority=900, attend="os.abort()")
    plant(machine.plugins, "RAISES", priority=800, attend="raise ValueError('no such kernel')")
    done = machine.tune()
    assert done.returncode == 0, done.stderr
    assert "its process crashed: SIGABRT" in done.stderr
    assert "ValueError: no such kernel" in done.stderr
    statuses = machine.statuses()
    # Two kinds of layer in two phases.
    assert statuses["CRASHES"] == [RowStatus.CRASHED] * 4
    assert statuses["RAISES"] == [RowStatus.CRASHED] * 4
    assert statuses["TORCH"] == [RowStatus.MEASURED] * 4
    assert {each["backend"] for each in machine.chosen("--tuned", machine.table).values()} == {"TORCH"}
    again = machine.tune()
    assert "0 cells to measure, 4 kept" in again.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_a_run_that_ends_early_and_the_next_one_goes_on(
    machine: Machine, number: signal.Signals
) -> None:
    """A worker of a killed run would measure on, and disturb the run that continues."""
    pids = machine.plugins / "pids"
    waits = (
        "os.path.exists({0!r}) or __import__('time').sleep(open({0!r}, 'w').write(str(os.getpid())) * 600)"
    )
    if number is signal.SIGINT:
        # As a compiler that the backend has started; the kernel ends the children of a killed process itself.
        started = "__import__('subprocess').Popen(['sleep', '600'])"
        waits = waits.replace("os.getpid()", f"{started}.pid")
    plant(machine.plugins, "WAITS", priority=900, attend=waits.format(str(pids)))
    run = machine.start()
    while not (pids.exists() and pids.read_text()):
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(number)
    assert run.wait(60) == (130 if number is signal.SIGINT else -signal.SIGKILL)
    end = time.monotonic() + 30
    while is_alive(pids.read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    done = machine.tune()
    assert done.returncode == 0, done.stderr
    assert machine.statuses()["WAITS"] == [RowStatus.MEASURED] * 4


@pytest.mark.rare
def test_a_new_version_leaves_exactly_its_rows_out_and_is_measured_again(machine: Machine) -> None:
    plant(machine.plugins, "SLOW", priority=900, attend="import time; time.sleep(0.01)")
    assert machine.tune().returncode == 0
    chosen = machine.chosen("--tuned", machine.table)
    assert {each["backend"] for each in chosen.values()} == {"TORCH"}
    assert next(iter(chosen.values()))["measured"]["over"] == "SLOW"
    plant(machine.plugins, "SLOW", priority=900, version="2.0", attend="import time; time.sleep(0.01)")
    later = next(iter(machine.chosen("--tuned", machine.table).values()))
    assert later["backend"] == "SLOW"
    assert any(
        "SLOW was measured with planted-slow 1.0, and 2.0 is installed: not used" in note
        for note in later["notes"]
    )
    assert "4 cells to measure" in machine.tune().stderr
    assert next(iter(machine.chosen("--tuned", machine.table).values()))["backend"] == "TORCH"


@pytest.mark.rare
def test_a_composite_of_the_phases_winners_is_measured_in_mixed_steps(machine: Machine) -> None:
    """One is slow in decodes and the other in prefills, so a plan by phase takes the fast half of each."""
    from attnplug.registry.measured.step_shapes import StepShape

    slow = "import time; time.sleep(0.02 * (args[1].shape[0] {} 4))"
    plant(machine.plugins, "PREFILLS", priority=900, attend=slow.format("<="))
    plant(machine.plugins, "DECODES", priority=800, attend=slow.format(">"))
    steps = "decode 2 x 64, prefill 2 x 32, mixed 2 x 64 + 1 x 32"
    done = machine.run(
        "tune", machine.config, "--device", "cpu", "--workload", steps, "--backends", "DECODES", "--output",
        machine.table,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [row for layer in read_table(machine.table).layers for row in layer.rows]
    assert {row.status for row in rows} == {RowStatus.MEASURED}
    pair = [row for row in rows if row.subject.backend == "PREFILLS+DECODES"]
    # Two kinds of layer.
    assert [row.shape for row in pair] == [StepShape.parse("mixed 2 x 64 + 1 x 32")] * 2
    code = f"""
import attnplug
from attnplug.integrations.transformers import read_config
plan = attnplug.plan(read_config({str(machine.config)!r}), "cpu", per_phase=True, tuned={str(machine.table)!r})
print(*plan.backends)
"""
    assert machine.python(code).split() == ["PREFILLS+DECODES"]


def test_processes_that_a_backend_starts_end_with_its_worker(machine: Machine) -> None:
    """Also in a run that ends in good order, and those in sessions of their own."""
    pids = machine.plugins / "pids"
    starts = 'open({!r}, \'a\').write(f\'{{__import__("subprocess").Popen(["sleep", "600"], start_new_session=True).pid}} \')'
    plant(machine.plugins, "STARTS", priority=900, attend=starts.format(str(pids)))
    done = machine.tune("--workload", "decode 2 x 40")
    assert done.returncode == 0, done.stderr
    assert pids.read_text().split()
    assert not any(map(is_alive, pids.read_text().split()))
