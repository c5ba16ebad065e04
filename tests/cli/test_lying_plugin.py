"""A plugin that claims what it does not do is found out, and refused from then on with the evidence."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

# Each test waits for commands that run checks in worker processes.
pytestmark = pytest.mark.slow

LIAR = ["attnplug-bad-liar"]
LAYER = ["--head-size", "64", "--dtype", "bfloat16", "--device", "cpu"]
GPT_OSS = str(Path(__file__).parents[2] / "examples" / "models" / "gpt-oss-20b.json")
MISTAKE = "these are the numbers of a known mistake: sinks ignored"


@dataclasses.dataclass(frozen=True)
class Machine:
    """A folder for evidence, and the program beside the plugin."""

    folder: Path
    run_with_plugins: object

    def __call__(self, *arguments, **env):
        home = {"XDG_DATA_HOME": str(self.folder), "XDG_CACHE_HOME": str(self.folder), "COLUMNS": "100"}
        command = ["-m", "attnplug", *map(str, arguments)]
        return self.run_with_plugins(LIAR, command, env={**home, **env}, timeout=500)

    def who_serves(self, *arguments, **env):
        """The backend that serves a layer."""
        return json.loads(self("explain", *LAYER, "--json", *arguments, **env).stdout)["backend"]

    def who_serves_gpt_oss(self, *arguments):
        """The backends that serve its layers, all of which have sinks."""
        done = self("select", GPT_OSS, "--device", "cpu", "--json", *arguments)
        return {each["backend"] for each in json.loads(done.stdout)["decisions"]}


@pytest.fixture(scope="module")
def machine(run_with_plugins, tmp_path_factory):
    """Where nothing was verified yet."""
    return Machine(tmp_path_factory.mktemp("before"), run_with_plugins)


@pytest.fixture(scope="module")
def verified(run_with_plugins, tmp_path_factory):
    """Where the plugin's claims were verified, and what came of that."""
    machine = Machine(tmp_path_factory.mktemp("after"), run_with_plugins)
    report = machine.folder / "matrix.json"
    command = ["matrix", "--verify", "--backend", "BAD_LIAR", "--device", "cpu", "--jobs", "2"]
    return machine, machine(*command, "--json", report), report


def test_it_is_chosen_as_long_as_nobody_looked(machine):
    assert machine.who_serves_gpt_oss() == {"BAD_LIAR"}


def test_verifying_refutes_its_claim_and_nothing_else(verified):
    _, done, report = verified
    assert done.returncode == 4, done.stdout + done.stderr
    (run,) = json.loads(report.read_text())["runs"]
    refuted = [each for each in run["cells"] if each["status"] == "refuted"]
    assert {each["feature"] for each in refuted} == {"sinks"}
    assert {each["phase"] for each in refuted} == {"prefill", "decode", "mixed"}
    assert all(MISTAKE in " ".join(each["why"]) for each in refuted)
    right = {each["feature"] for each in run["cells"] if each["status"] == "verified"}
    assert right == {"plain", "sliding_window"}


def test_select_then_serves_layers_with_sinks_by_another(verified):
    machine, *_ = verified
    assert machine.who_serves_gpt_oss() == {"TORCH"}


def test_asked_for_by_name_it_is_refused_with_the_evidence(verified):
    machine, *_ = verified
    done = machine("select", GPT_OSS, "--device", "cpu", "--backend", "BAD_LIAR")
    said = " ".join(done.stdout.split())
    assert done.returncode == 3
    assert "refuted when BAD_LIAR was run here on " in said
    assert MISTAKE in said
    assert "attnplug matrix --verify --backend BAD_LIAR" in said


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_it_is_refused_in_either_phase(verified, phase):
    machine, *_ = verified
    assert machine.who_serves("--sinks", "--phase", phase) == "TORCH"


def test_what_it_does_as_it_says_it_goes_on_doing(verified):
    machine, *_ = verified
    assert machine.who_serves("--sliding-window", "128") == "BAD_LIAR"


def test_the_user_may_have_it_all_the_same(verified):
    machine, *_ = verified
    assert machine.who_serves_gpt_oss("--allow-refuted", "BAD_LIAR") == {"BAD_LIAR"}
    assert machine.who_serves("--sinks", ATTNPLUG_ALLOW_REFUTED="all") == "BAD_LIAR"
    done = machine("explain", "--sinks", *LAYER, ATTNPLUG_ALLOW_REFUTED="BAD_LIAR")
    said = " ".join(done.stdout.split())
    assert "allowed by ATTNPLUG_ALLOW_REFUTED: refuted when BAD_LIAR was run here" in said
    assert MISTAKE in said


def test_doctor_names_it(verified):
    machine, *_ = verified
    done = machine("doctor", "BAD_LIAR", "--json")
    (finding,) = [each for each in json.loads(done.stdout)["findings"] if each["state"] == "warning"]
    assert finding["what"] == "BAD_LIAR on cpu"
    assert "refuted here, and refused: sinks/" in finding["detail"]


def test_nothing_of_it_is_known_elsewhere(machine, verified):
    assert machine.who_serves("--sinks") == "BAD_LIAR"
