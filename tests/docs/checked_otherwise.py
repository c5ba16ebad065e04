"""What is checked of a command that a test cannot run: that it means something here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import typer.main
from fences import ROOT, Command, Fence

from attnplug.cli.app import app

__all__ = ["REASONS", "check_command"]

REASONS = ("installs from a package index", "needs a GPU", "takes some 15 s")
"""Why a block may be left unrun; `data-not-run` names one."""

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_INSTALLED = re.compile(r"(?:\.|attnplug)(?:\[([\w,-]+)\])?")


def check_command(command: Command, fence: Fence, folder: Path) -> None:
    """AssertionError where a command names an option, file, extra or subcommand that is not there.

    `folder` is where the page has got to: what its commands have written is there.
    """
    assert not command.shown.strip(), f"{fence.place}: output is shown that nothing compares"
    for part in re.split(r"&&|;", command.text):
        program, *arguments = shlex.split(part)
        try:
            if program == "pip":
                _check_pip(arguments)
            elif program == "attnplug":
                _check_attnplug(arguments)
            elif program == "python":
                _check_script(arguments)
            else:
                assert program == "pytest", "nothing checks this program without running it"
                _check_pytest(arguments, folder)
        except Exception as problem:
            raise AssertionError(f"{fence.place}: {part.strip()}: {problem}") from problem


def _check_pip(arguments: list[str]) -> None:
    verb, *rest = arguments
    assert verb == "install", f"pip {verb} is not known here"
    while rest:
        word = rest.pop(0)
        if word == "-c":
            assert (ROOT / rest.pop(0)).is_file(), "no such constraints file"
        elif word != "-e":
            found = _INSTALLED.fullmatch(word)
            assert found, f"{word} is neither this project nor one of its extras"
            extras = set(filter(None, (found[1] or "").split(",")))
            assert extras <= set(_PROJECT["optional-dependencies"]), f"{word} names an extra that is none"


def _check_attnplug(arguments: list[str]) -> None:
    """Parse the arguments with the program's own parser, which refuses options that it does not have."""
    group = typer.main.get_command(app)
    name, *rest = arguments
    command = group.commands.get(name)  # type: ignore[attr-defined]
    assert command is not None, f"attnplug has no command {name}"
    command.make_context(name, rest)


def _check_pytest(arguments: list[str], folder: Path) -> None:
    for word in arguments:
        assert not word.startswith("-"), f"{word} is not known here"
        assert (folder / word).exists(), f"there is no {word}"
        assert list((folder / word).rglob("test_*.py")), f"there are no tests in {word}"


def _check_script(arguments: list[str]) -> None:
    script, *rest = arguments
    assert (ROOT / script).is_file(), f"there is no {script}"
    shown = subprocess.run(
        [sys.executable, ROOT / script, "--help"], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    for word in rest:
        assert not word.startswith("-") or re.search(rf"{word}\b", shown), f"{script} has no option {word}"
