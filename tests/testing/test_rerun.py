"""The lines that run a failing check again, as a shell reads them."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from attnplug.testing.isolation.listing import SuiteRequest
from attnplug.testing.isolation.results import cli_command, node_command, suite_command

CHECK = "correct/mixed-h4x2-d64-float32-b16-NHD-token_topk(12)-it's $HOME"


def test_the_line_has_all_that_the_run_had() -> None:
    request = SuiteRequest("ACME@acme kernels", "cuda:1", "full", "my known.toml")
    words = shlex.split(cli_command(request, CHECK, {"--timeout": "7"}))
    assert words == [
        *("attnplug", "conformance", "ACME@acme kernels", "--only", CHECK, "--level", "full"),
        *("--device", "cuda:1", "--known-failures", "my known.toml", "--timeout", "7", "--jobs", "1"),
    ]


def test_the_line_has_the_options_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    request = SuiteRequest("ACME", options=("tile=32", "kernel=it's fast"))
    words = shlex.split(cli_command(request, CHECK))
    assert words[5:9] == ["--option", "tile=32", "--option", "kernel=it's fast"]
    assert shlex.split(suite_command(CHECK, {}, ("tile=32",)))[-2:] == ["--attn-option", "tile=32"]
    monkeypatch.setenv("ATTNPLUG_OPTIONS", "ACME.tile=32,ACME.order=a b")
    assert shlex.split(cli_command(request, CHECK))[:2] == [
        "ATTNPLUG_OPTIONS=ACME.tile=32,ACME.order=a b",
        "attnplug",
    ]


def test_options_that_were_not_given_stay_out() -> None:
    assert cli_command(SuiteRequest("TORCH"), "pages/all") == (
        "attnplug conformance TORCH --only pages/all --level smoke --jobs 1"
    )


def test_every_part_of_a_request_is_in_the_line_or_cannot_change_one_check() -> None:
    # `only` names the check itself, and `checks_of` is of another command.
    known = {"name", "device", "level", "known_failures", "only", "checks_of", "options"}
    assert {field.name for field in dataclasses.fields(SuiteRequest)} == known


def test_the_line_for_the_suite_in_pytest_names_its_node() -> None:
    words = shlex.split(
        suite_command(CHECK, {"--attn-backend": "ACME", "--attn-device": None, "--level": "full"})
    )
    assert words == [
        *("pytest", "-p", "attnplug.testing.plugin", "--pyargs"),
        *(f"attnplug.testing.suite::test_conformance[{CHECK}]", "--attn-backend", "ACME", "--level", "full"),
    ]


def test_the_line_for_a_test_of_an_author_is_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "tests/test acme.py::test_kit[correct/one-h4x2] (call)")
    assert node_command() == "pytest 'tests/test acme.py::test_kit[correct/one-h4x2]'"
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    assert node_command() is None


@pytest.mark.slow
def test_pytest_prints_the_line_once_and_the_line_runs_the_check(tmp_path: Path) -> None:
    (tmp_path / "test_acme.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from few_checks import few_checks\n"
        "from attnplug.core import Device\n"
        "from attnplug.backends.torch_native import TorchBackend\n"
        "from attnplug.testing.conformance.target import Target\n"
        "from attnplug.testing.decorator import as_parameters\n"
        "import pytest\n"
        "CHECKS = list(few_checks(Target(TorchBackend, Device('cpu'))))\n"
        "@pytest.mark.parametrize('check', as_parameters(CHECKS, {}))\n"
        "def test_kit(check):\n"
        "    check()\n"
    )

    def run(*words: str) -> str:
        command = [sys.executable, "-m", *words, "-p", "no:cacheprovider"]
        # Under CI, pytest's summary repeats each message whole.
        plain = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")}
        plain["PYTEST_ADDOPTS"] = ""
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=plain, check=False
        ).stdout

    printed = run("pytest", "test_acme.py")
    lines = [line.partition("rerun: ")[2] for line in printed.splitlines() if "rerun: " in line]
    assert lines == ["pytest 'test_acme.py::test_kit[bad/fails]'"]
    assert "1 failed" in run(*shlex.split(lines[0]))
