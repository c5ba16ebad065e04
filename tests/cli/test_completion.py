"""Completion in bash, zsh and fish: commands, options and values, quickly and without torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = "import sys; from attnplug.cli import main\ntry: main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"


def completed(line: str, shell: str = "bash", **environment: str) -> list[str]:
    """The words that the shell gets for a line whose last word is incomplete."""
    words = line.split(" ")
    asked = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **asked, "_ATTNPLUG_COMPLETE": f"complete_{shell}", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    # The program runs in a child; both processes say whether they have torch.
    assert set(done.stderr.split()) == {"False"}, "torch is imported, or something is printed over the prompt"
    return done.stdout.split()


# Each starts the program twice; a plain run has one of each kind of values.
@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param(*("attnplug expl", ["explain", "explain-code"]), marks=pytest.mark.slow),
        ("attnplug explain --dev", ["--device"]),
        ("attnplug explain --device h1", ["h100"]),
        pytest.param(*("attnplug explain --device H1", ["H100"]), marks=pytest.mark.slow),
        ("attnplug select --device rtx4090", ["rtx4090", "rtx4090d"]),
        pytest.param(*("attnplug explain --dtype b", ["bfloat16"]), marks=pytest.mark.slow),
        ("attnplug explain --kv-cache-dtype fp8_e5m2f", ["fp8_e5m2fnuz"]),
        pytest.param(*("attnplug explain --phase d", ["decode"]), marks=pytest.mark.slow),
        pytest.param(*("attnplug select --backend TRI", ["TRITON"]), marks=pytest.mark.slow),
        pytest.param(*("attnplug select --backend sli", ["sliding="]), marks=pytest.mark.slow),
        ("attnplug select --backend TORCH,sliding=TRI", ["TORCH,sliding=TRITON"]),
        ("attnplug conformance TO", ["TORCH"]),
        pytest.param(*("attnplug explain-code kv_cache_d", ["kv_cache_dtype"]), marks=pytest.mark.slow),
        pytest.param(*("attnplug matrix --feature sink", ["sinks"]), marks=pytest.mark.slow),
    ],
)
def test_bash_completes(line, words):
    assert completed(line) == words


def test_zsh_and_fish_complete_too():
    assert "h100" in "".join(completed("attnplug explain --device h1", "zsh"))
    assert completed("attnplug explain --device h1", "fish") == ["h100"]


def test_a_wrong_variable_completes_nothing_and_prints_nothing():
    assert completed("attnplug show T", ATTNPLUG_STRICT="maybe") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_printed(run, shell):
    outcome = run("completion", shell)
    assert (outcome.code, outcome.err) == (0, "")
    assert f"_ATTNPLUG_COMPLETE=complete_{shell}" in outcome.out


def test_the_script_for_bash_is_valid(run, tmp_path):
    script = tmp_path / "attnplug.bash"
    script.write_text(run("completion", "bash").out)
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0


def test_another_shell_is_bad_usage(run):
    assert run("completion", "tcsh").code == 2
