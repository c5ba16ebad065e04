"""comparison.py reads options, runs a script for each choice, and shows what it printed; model_folder.py writes a config."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import choice_process
import choice_run
import comparison
import model_folder
import pytest
from rich.console import Console


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "none.json"], "none.json: no such file"),
        (["--max-tokens", "1"], "at least 2 are needed"),
        (["--requests", "0"], "'0' is not an integer from 1"),
        (["--prompts", "90-70"], "90-70: the least is above the most"),
        (["--prompts", "31"], "31: prompts need 32 to 16384 tokens"),
        (["--prompts", "32-16385"], "32-16385: prompts need 32 to 16384 tokens"),
        (["--prompts", "20-"], "20-: give a number of tokens, or the least and the most as in 100-14000"),
    ],
)
def test_bad_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        comparison.parser("about").parse_args(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        (
            "x\nValueError: a\nERROR [core.py:1] NoBackendError: none\n  T: b\n[rank0]:[W1 not closed",
            "NoBackendError: none T: b",
        ),
        ("x\n[rank0]: Traceback\n[rank0]: ImportError: no y\n[rank0]:[W1 not closed", "ImportError: no y"),
        ("Traceback\n  assert a\nAssertionError\nends all\n", "AssertionError"),
        ("x\nFatal Python error: Segmentation fault\nThread 1\n", "Fatal Python error: Segmentation fault"),
        ("killed\n\n", "killed"),
        ("", ""),
    ],
)
def test_the_error_is_the_message_of_the_last_exception(printed: str, shown: str) -> None:
    assert choice_process.last_error(printed) == shown


def write_run(folder: Path, text: str) -> Path:
    """A script in place of vllm_run.py, with `said` for standard error."""
    file = folder / "some_run.py"
    head = "import json, os, subprocess, sys, time\nsaid = lambda text: print(text, file=sys.stderr, flush=True)\n"
    file.write_text(head + text)
    return file


def gone(number: int) -> bool:
    """Whether a process ends within a few seconds; one that waits for its parent's call counts."""
    for _ in range(100):
        file = Path(f"/proc/{number}/stat")
        if not file.exists() or file.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_a_choice_that_takes_too_long_says_how_far_it_came_and_ends_with_all_it_started(
    tmp_path: Path,
) -> None:
    file = write_run(
        tmp_path,
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "said('starts vLLM'); time.sleep(60)",
    )
    found = choice_process.run(file, "ATTNPLUG", {}, 3.0)
    assert found == {"error": "took more than 3 s; its last line is: starts vLLM"}
    assert gone(int((tmp_path / "child").read_text()))


def test_figures_so_far_are_kept_when_a_choice_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"""
said({choice_run.SAID!r} + '2 s: loads ' + sys.argv[1] + ' with ' + json.load(sys.stdin)['model'])
print('warning')
print({choice_run.MARK!r} + json.dumps(dict(workloads=dict(a=1))), flush=True)
raise ValueError('no memory')
"""
    kept: list[object] = []
    found = choice_process.run(write_run(tmp_path, text), "fa3", {"model": "m"}, 60.0, kept.append)
    assert kept == [{"workloads": {"a": 1}}]
    assert found == {"workloads": {"a": 1}, "error": "ValueError: no memory"}
    assert capsys.readouterr().out == "  fa3: 2 s: loads fa3 with m\n"


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_the_end_of_the_comparison_ends_the_choice_too(tmp_path: Path, ending: signal.Signals) -> None:
    file = write_run(
        tmp_path, f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); said('run'); time.sleep(60)"
    )
    text = f"""
import comparison, pathlib
options = comparison.parser("about").parse_args([])
options.choices = ["a"]
comparison.compare("vllm", options, run_file=pathlib.Path({str(file)!r}), names=(), missing=None)
"""
    folder = Path(comparison.__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": str(folder)}, stdout=subprocess.DEVNULL
    ) as outer:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            assert outer.poll() is None
            time.sleep(0.05)
        outer.send_signal(ending)
        assert outer.wait(20) == 128 + ending
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_choices_that_start_at_once_measure_in_turn_and_a_failure_leaves_its_log(tmp_path: Path) -> None:
    text = f"""
sys.path.insert(0, {str(Path(comparison.__file__).parent)!r})
import choice_run
settings, name = json.load(sys.stdin), sys.argv[1]
times = open({str(tmp_path)!r} + '/' + name, 'w')
print(time.time(), file=times)
if name == 'b/2':
    raise ValueError('no b')
choice_run.wait_for_turn(*settings['turns'])
print(time.time(), file=times)
time.sleep(0.5)
print(time.time(), file=times)
print(choice_run.MARK + json.dumps(dict(layers=[])))
""".replace("name, 'w'", "name.replace('/', '-'), 'w'")
    options = comparison.parser("about").parse_args(["--json", str(tmp_path / "found.json")])
    options.choices, options.at_once = ["a", "b/2", "c"], True
    given = {"run_file": write_run(tmp_path, text), "names": (), "missing": None}
    assert comparison.compare("sglang", options, **given) == 1
    found = json.loads((tmp_path / "found.json").read_text())["choices"]
    assert found == {"a": {"layers": []}, "b/2": {"error": "ValueError: no b"}, "c": {"layers": []}}
    first, last = (list(map(float, (tmp_path / name).read_text().split())) for name in "ac")
    assert last[0] < first[1], "they start together"
    assert first[2] <= last[1], "they measure one after another"
    assert "raise ValueError" in (tmp_path / "found-b-2.log").read_text()
    assert not (tmp_path / "found-a.log").exists()


@pytest.mark.slow
def test_a_choice_that_never_gets_ready_costs_the_others_no_time(tmp_path: Path) -> None:
    text = f"""
sys.path.insert(0, {str(Path(comparison.__file__).parent)!r})
import choice_run
settings, name = json.load(sys.stdin), sys.argv[1]
if name == 'hangs':
    time.sleep(100)
choice_run.wait_for_turn(*settings['turns'])
print(choice_run.MARK + json.dumps(dict(layers=[])))
"""
    file = tmp_path / "new" / "found.json"
    options = comparison.parser("about").parse_args(["--json", str(file), "--timeout", "8"])
    options.choices, options.at_once = ["a", "hangs", "b"], True
    given = {"run_file": write_run(tmp_path, text), "names": (), "missing": None}
    assert comparison.compare("sglang", options, **given) == 1
    late = {"error": "took more than 8 s; its last line is: -"}
    assert json.loads(file.read_text())["choices"] == {
        "a": {"layers": []},
        "hangs": late,
        "b": {"layers": []},
    }


def test_an_engine_that_kills_the_script_after_an_error_leaves_the_error(tmp_path: Path) -> None:
    text = "said('Traceback\\nValueError: no pages\\nSIGQUIT received'); os.kill(os.getpid(), 9)"
    found = choice_process.run(write_run(tmp_path, text), "fa3", {}, 60.0)
    assert found == {"error": "ValueError: no pages SIGQUIT received"}


def test_a_choice_that_is_stopped_or_killed_says_so(tmp_path: Path) -> None:
    file, stop = write_run(tmp_path, "import os; said('loads'); os.kill(os.getpid(), 9)"), threading.Event()
    found = choice_process.run(file, "fa3", {}, 60.0)
    assert found == {"error": "ended by signal 9; its last line is: loads"}
    stop.set()
    found = choice_process.run(write_run(tmp_path, "time.sleep(60)"), "fa3", {}, 60.0, stop=stop)
    assert found == {"error": "was stopped; its last line is: -"}


def test_results_without_a_single_run_are_still_shown(capsys: pytest.CaptureFixture[str]) -> None:
    comparison.show(Console(), {"FLASH_ATTN": {"error": "out of memory"}})
    assert "FLASH_ATTN did not run: out of memory" in capsys.readouterr().out


def test_ragged_prompts_differ_in_length() -> None:
    lengths = comparison.workloads(64, [(2048, 2048), (100, 14_000)])
    assert set(lengths["64 x 2048"]) == {2048}
    ragged = lengths["64 x 100 to 14000"]
    assert 100 <= min(ragged) < 300 < 10_000 < max(ragged) <= 14_000


@pytest.mark.parametrize(("layers", "kinds"), [(2, "ab"), (6, "ababab")])
def test_a_configuration_has_as_many_layers_as_are_asked_for(layers: int, kinds: str, tmp_path: Path) -> None:
    given = tmp_path / "config.json"
    given.write_text(
        json.dumps(
            {
                "num_hidden_layers": 4,
                "layer_types": list("abab"),
                "quantization_config": {},
                "rope_parameters": {"a": {"rope_theta": 1e4}, "b": {"rope_type": "yarn"}},
            }
        )
    )
    made = json.loads((Path(model_folder.folder(str(given), layers)) / "config.json").read_text())
    assert made == {
        "num_hidden_layers": layers,
        "layer_types": list(kinds),
        "tie_word_embeddings": False,
        "rope_parameters": {"a": {"rope_theta": 1e8}, "b": {"rope_type": "yarn"}},
    }


def test_only_gpt_oss_has_experts_that_can_be_replaced() -> None:
    assert (
        model_folder.dense_size({"model_type": "gpt_oss", "intermediate_size": 100, "num_experts_per_tok": 4})
        == 400
    )
    with pytest.raises(ValueError, match="--dense is for gpt_oss; this model is 'qwen3'"):
        model_folder.dense_size({"model_type": "qwen3"})
