"""Runs one page in a process of its own, as its readers do: `python run_page.py PAGE FOLDER`."""

from __future__ import annotations

import doctest
import io
import os
import re
import runpy
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import yaml
from checked_otherwise import REASONS, check_command
from fences import ROOT, Fence, commands, fences
from workplace import Workplace

FLAGS = doctest.ELLIPSIS | doctest.REPORT_NDIFF
# `tune` adds such a line wherever the machine was busy with something else.
NOISE = re.compile(r"^.*: noisy: .*\n", re.MULTILINE)


def run_page(page: str, folder: Path) -> None:
    """Run the blocks of a page in order; AssertionError where one does not what it says."""
    blocks = fences(page)
    run = [f for f in blocks if f.language == "console" and "data-not-run" not in f.options]
    # What is printed may speak of it too: refusals say what to install.
    installs = any("pip install" in command.text for f in run for command in commands(f))
    workplace = Workplace(folder / "clone", installs=installs)
    os.chdir(workplace.folder)
    page_module = types.ModuleType("page")
    # A dataclass looks up the module that defines it.
    sys.modules["page"] = page_module
    names: dict[str, Any] = vars(page_module)
    for fence in blocks:
        if "data-file" in fence.options:
            workplace.write(fence.options["data-file"], fence.code)
        elif fence.language == "diff":
            workplace.edit(fence.options["data-edit"], fence.code)
        elif fence.language == "console":
            run_commands(fence, workplace)
        elif fence.language == "pycon":
            assert not installs, f"{fence.place}: what this page installs is not installed for its sessions"
            run_session(fence, names)
        elif fence.language == "python":
            exec(compile(fence.code, fence.place, "exec", dont_inherit=True), names)
        elif fence.language == "toml":
            check_toml(fence, folder)
        elif fence.language == "yaml":
            check_workflow(fence)


def run_commands(fence: Fence, workplace: Workplace) -> None:
    for command in commands(fence):
        if "data-not-run" in fence.options:
            assert fence.options["data-not-run"] in REASONS, f"{fence.place}: no known reason"
            check_command(command, fence, workplace.folder)
            continue
        code, printed = workplace.run(command.text)
        place = f"{fence.place}: {command.text}"
        assert code == int(fence.options.get("data-exit", "0")), f"{place} ended with {code}:\n{printed}"
        if command.shown:
            checker = doctest.OutputChecker()
            example = doctest.Example(command.text, command.shown)
            printed = NOISE.sub("", printed)
            same = checker.check_output(command.shown, printed, FLAGS)
            assert same, f"{place}\n{checker.output_difference(example, printed, FLAGS)}"


def run_session(fence: Fence, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(fence.code, names, fence.place, fence.page, fence.line - 1)
    test.globs = names  # the parser has copied them; what a block defines is there in the next
    report = io.StringIO()
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.write, clear_globs=False)
    assert result.attempted, f"{fence.place}: no line begins with >>>"
    assert not result.failed, report.getvalue()


def check_toml(fence: Fence, folder: Path) -> None:
    """A recipe is read as the script in ci/ reads it."""
    if fence.options.get("title", "").startswith("ci/recipes/"):
        recipe = folder / "recipe.toml"
        recipe.write_text(fence.code)
        runpy.run_path(str(ROOT / "ci" / "recipe.py"))["Recipe"].read(recipe)
    else:
        tomllib.loads(fence.code)


def check_workflow(fence: Fence) -> None:
    """A job that calls a workflow of this repository gives the inputs that it takes, and those it needs."""
    for job in yaml.safe_load(fence.code)["jobs"].values():
        path = job["uses"].partition("/attnplug/")[2].partition("@")[0]
        # YAML reads the key `on` as true.
        inputs = yaml.safe_load((ROOT / path).read_text())[True]["workflow_call"]["inputs"]
        assert set(job["with"]) <= set(inputs)
        assert {name for name, each in inputs.items() if each.get("required")} <= set(job["with"])


if __name__ == "__main__":
    run_page(sys.argv[1], Path(sys.argv[2]))
