"""What is checked of a command that a test cannot run: that it means something here."""

from __future__ import annotations

import re
import shlex
import tomllib

import typer.main
from fences import ROOT, Command, Fence

from attnplug.cli.app import app

__all__ = ["REASONS", "check_command"]

REASONS = ("installs from a package index", "needs a GPU", "takes minutes")
"""Why a block may be left unrun; `data-not-run` names one."""

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_INSTALLED = re.compile(r"(?:\.|attnplug)(?:\[([\w,-]+)\])?")


def check_command(command: Command, fence: Fence) -> None:
    """AssertionError where a command names an option, file, extra or subcommand that is not there."""
    assert not command.shown.strip(), f"{fence.place}: output is shown that nothing compares"
    for part in re.split(r"&&|;", command.text):
        program, *arguments = shlex.split(part)
        check = {"pip": _check_pip, "attnplug": _check_attnplug}.get(program)
        assert check is not None, f"{fence.place}: nothing checks {program} without running it"
        try:
            check(arguments)
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
