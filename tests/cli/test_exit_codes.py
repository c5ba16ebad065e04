"""Exit codes are those of docs/reference/exit-codes.md, in every command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

GPT = Path(__file__).resolve().parents[2] / "examples" / "models" / "gpt-oss-20b.json"
MISSING = "no/such/file.json"
CODES = {
    ("list",): 0,
    ("list", "--no-load"): 0,
    ("list", "--known"): 0,
    ("list", "--known", "--no-load"): 2,
    ("show", "TORCH"): 0,
    ("show", "NONE"): 2,
    ("explain", "--device", "cpu"): 0,
    ("explain", "--mla", "1536,512,128,64,128", "--sinks", "--device", "h100"): 3,
    ("explain", "--dtype", "fp9"): 2,
    ("explain", "--kv-cache-dtype", "fp9"): 2,
    ("explain", "--kv-cache-dtype", ""): 2,
    ("explain", "--kv-cache-dtype", "float8_e4m3fn", "--device", "cpu"): 0,
    ("explain", "--device", "gpu9"): 2,
    ("explain", "--backend", "NONE"): 2,
    ("explain", "--option", "nothing"): 2,
    ("explain", "--nothing"): 2,
    ("select", GPT, "--device", "cpu"): 0,
    ("select", GPT, "--device", "cpu", "--kv-cache-dtype", "fp9"): 2,
    ("select", GPT, "--device", "cpu", "--memory", "lots"): 2,
    ("select", GPT, "--device", "cpu", "--tp", "0"): 2,
    ("select", GPT, "--device", "cpu", "--tp", "3"): 2,
    ("select", GPT, "--device", "cpu", "--tp", "9" * 23): 2,
    ("select", GPT, "--device", "cpu", "--backend", ""): 2,
    ("explain", "--device", "cpu", "--backend", " "): 2,
    ("select", MISSING): 2,
    ("select",): 2,
    ("explain-code", "head_size"): 0,
    ("explain-code", "none"): 2,
    ("completion", "bash"): 0,
    ("completion", "none"): 2,
    ("matrix", "--device", "gpu9"): 2,
    ("matrix", "--backend", "NONE"): 2,
    ("matrix", "--resume"): 2,
    ("matrix", "merge", MISSING): 2,
    ("matrix", "diff", MISSING, MISSING): 2,
    ("matrix", "none"): 2,
    ("conformance", "TORCH", "--junit", MISSING): 2,
    ("conformance", "TORCH", "--shard", "3/2"): 2,
    ("doctor", "NONE"): 2,
    ("tune",): 2,
    ("tune", MISSING, "--device", "cpu"): 2,
    ("tune", GPT, "--device", "h100"): 2,
    ("tune", GPT, "--device", "cpu", "--workload", "talk"): 2,
    ("tune", GPT, "--device", "cpu", "--workload", "chat", "--batch", "1"): 2,
    ("tune", GPT, "--device", "cpu", "--prefill", "4"): 2,
    ("tune", GPT, "--device", "cpu", "--budget", "soon"): 2,
    ("tune", GPT, "--device", "cpu", "--backends", "NONE"): 2,
    ("tune", GPT, "--device", "cpu", "--output", "/"): 2,
    ("select", GPT, "--device", "cpu", "--tuned", MISSING): 2,
    ("select", GPT, "--device", "cpu", "--tuned", MISSING, "--no-tuned"): 2,
    ("explain", "--device", "cpu", "--tuned", MISSING): 2,
    ("new-backend", "a b"): 2,
    ("new-format", "a b"): 2,
    ("--version",): 0,
    ("none",): 2,
    (): 2,
}


@pytest.mark.parametrize(
    ("arguments", "code"),
    CODES.items(),
    ids=lambda each: " ".join(map(str, each)) if isinstance(each, tuple) else "",
)
def test_an_exit_code_is_as_documented(run, arguments, code):
    outcome = run(*arguments)
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.err if code == 2 and arguments else True


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": "64"}, "head_dim"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1"),
        ({"text_config": 3}, "text_config=3, which must be an object"),
    ],
    ids=str,
)
def test_a_bad_configuration_is_bad_usage_and_names_the_field(run, tmp_path, change, words):
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2, "head_dim": 64}
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | sizes | change)
    )
    outcome = run("select", file, "--device", "cpu")
    assert outcome.code == 2, outcome.err
    assert words in " ".join(outcome.err.split())


def test_a_doctor_that_hears_of_no_plugin_tells_why(run):
    outcome = run("doctor", "TORCH", "--timeout", "0.1")
    assert outcome.code == 1, outcome.err
    assert "killed after 0.1 s" in " ".join(outcome.out.split())
    assert "not a loaded backend" not in outcome.err


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--known-failures", MISSING), ("--device", "gpu9")])
def test_bad_usage_that_the_listing_finds(run, arguments):
    outcome = run("conformance", "TORCH", *arguments)
    assert (outcome.code, outcome.out) == (2, ""), outcome.err


def processes(mark: str) -> list[int]:
    """The processes that have inherited a variable with this value."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                has_mark = mark.encode() in (entry / "environ").read_bytes()
                is_running = (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            except OSError:
                continue
            found += [int(entry.name)] if has_mark and is_running else []
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        (("doctor",), 3),
        pytest.param(("conformance", "TORCH", "--device", "cpu"), 3, marks=pytest.mark.slow),
        (("select", GPT, "--device", "cpu", "--for", "transformers"), 2),
        pytest.param(
            ("matrix", "--verify", "--backend", "TORCH", "--device", "cpu", "--json", "matrix.json"),
            3,
            marks=pytest.mark.slow,
        ),
        (("matrix", "--backend", "TORCH", "--device", "cpu", "--json", "matrix.json"), 2),
        pytest.param(
            ("tune", GPT, "--device", "cpu", "--output", "cache/table.json"), 3, marks=pytest.mark.slow
        ),
    ],
    ids=lambda each: " ".join(map(str, each[:2])) if isinstance(each, tuple) else "",
)
def test_ctrl_c_ends_a_command_and_its_children(tmp_path, arguments, number):
    ended_by(signal.SIGINT, tmp_path, arguments, number)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_sigterm_interrupts_a_conformance_run(tmp_path):
    ended_by(signal.SIGTERM, tmp_path, ("conformance", "TORCH", "--device", "cpu"), 3)


def ended_by(stop, tmp_path, arguments, number):
    mark = uuid.uuid4().hex
    environment = {**os.environ, "INHERITED_MARK": mark, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    child = subprocess.Popen(
        [sys.executable, "-m", "attnplug", *map(str, arguments)],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # The program runs in a child of its own, and works in further ones.
    while child.poll() is None and len(processes(mark)) < number:
        pass
    child.send_signal(stop)
    _, problems = child.communicate(timeout=60)
    assert child.returncode == 130, problems
    assert "Traceback" not in problems
    # On a busy machine a process that was killed takes a moment to end.
    until = time.monotonic() + 10
    while processes(mark) and time.monotonic() < until:
        time.sleep(0.05)
    assert not processes(mark)
    written = [path for path in tmp_path.iterdir() if path.name != "cache"]
    assert [path.name for path in written] in ([], ["matrix.json"])
    for path in written:
        assert json.loads(path.read_text())["schema"] == "attnplug.matrix"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [("explain",), ("list", "--json"), pytest.param(("matrix", "--html", "-"), marks=pytest.mark.slow)],
)
def test_output_that_cannot_be_written_is_one_message(arguments):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "attnplug", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (
        1,
        "attnplug: the output cannot be written: No space left on device\n",
    )
