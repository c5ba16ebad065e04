"""`--quiet`: the result and errors, without progress, notes and advice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

GPT = Path(__file__).resolve().parents[2] / "examples" / "models" / "gpt-oss-20b.json"
CHECKS = ("conformance", "TORCH", "--device", "cpu", "--only", "declaration/b*")


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("select", GPT, "--device", "sm70"), "warning: only the reference TORCH serves"),
        (("explain", "--device", "sm70"), "warning: only the reference TORCH serves"),
    ],
    ids=["select", "explain"],
)
def test_advice_is_left_out(run, arguments, advice):
    loud, quiet = run(*arguments), run(*arguments, "--quiet")
    assert advice in loud.out
    assert loud.out.startswith(quiet.out.rstrip("\n"))
    assert advice not in quiet.out
    assert "TORCH" in quiet.out
    assert run(*arguments, "-q", "--json").json == run(*arguments, "--json").json


def test_notes_of_a_model_are_left_out(run, tmp_path):
    config = json.loads(GPT.read_text()) | {"torch_dtype": "float32", "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("select", tmp_path / "config.json", "--device", "h100", "--assume-installed", "all")
    assert "--dtype bfloat16 shows the choice" in " ".join(run(*asked).out.split())
    assert "--dtype bfloat16" not in run(*asked, "--quiet").out


def test_an_error_is_printed(run):
    outcome = run("explain", "--head-size", "0", "--quiet")
    assert (outcome.code, outcome.out) == (2, "")
    assert "head_size" in outcome.err


def test_a_list_has_no_notes_but_failures(run, monkeypatch):
    from attnplug.registry.default import get_registry
    from attnplug.registry.plugin_set import PluginSet

    first, second, *_ = get_registry().records
    records = (
        dataclasses.replace(first, reason="a note"),
        dataclasses.replace(second, status=type(second.status)("broken"), reason="it raised"),
    )
    monkeypatch.setattr(PluginSet, "records", property(lambda self: records))
    loud, quiet = run("list").out, run("list", "--quiet").out
    assert "a note" in loud
    assert "it raised" in loud
    assert "a note" not in quiet
    assert "it raised" in quiet


def test_what_a_pattern_names_is_no_longer_explained(run):
    asked = (
        "matrix",
        "--backend",
        "TORCH",
        "--device",
        "cpu",
        "--only",
        "sinks/decode/d72/float32/auto/b16/NHD",
    )
    loud, quiet = run(*asked), run(*asked, "--quiet")
    assert "is not sampled" in loud.err
    assert quiet.err == ""
    assert quiet.out == loud.out


@pytest.mark.slow
def test_a_run_prints_its_sum_alone(run):
    outcome = run(*CHECKS, "--quiet")
    assert outcome.code == 0
    assert outcome.err == ""
    first, last = outcome.out.splitlines()
    assert first.startswith("TORCH on cpu with Python ")
    assert " passed in " in last


@pytest.mark.slow
def test_a_tuning_prints_its_choices_alone(run, few_heads, tmp_path):
    step = ("--device", "cpu", "--workload", "decode 1 x 16", "--output", tmp_path / "t.json")
    outcome = run("tune", few_heads, *step, "--quiet")
    assert outcome.code == 0
    assert outcome.err == ""
    assert "chosen" in outcome.out


def test_a_report_tells_no_progress(run, monkeypatch):
    from attnplug.cli.output import own_output
    from attnplug.cli.output.run_report import RunReport

    monkeypatch.setattr(own_output._Streams, "quiet", True)
    said = []
    monkeypatch.setattr(RunReport, "say", lambda self, text, style=None: said.append(text))
    report = RunReport(verbose=True)
    report.tell("3 of 10")
    report.say("2 checks failed")
    assert said == ["2 checks failed"]
    assert not report._verbose
