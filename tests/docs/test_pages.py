"""Every page of the site does what it says: its commands and Python sessions are run, outputs compared."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from fences import DOCS, PAGES, commands, fences
from workplace import readers_environment

RUN_PAGES = [
    page for page in PAGES if any(f.language in ("console", "pycon", "python") for f in fences(page))
]
PROGRAMS = ("attnplug", "cat", "ls", "pip", "pytest", "python", "torchrun")
OPTIONS = {
    "console": {"data-exit", "data-not-run"},
    "diff": {"data-edit", "title"},
    "pycon": set(),
    "python": {"data-file", "title"},
    "text": {"title"},
    "toml": {"data-file", "title"},
    "yaml": {"title"},
}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_only_blocks_that_are_checked(page: str) -> None:
    hidden = re.findall(r"^(?:[ \t]+(?:```|~~~)|~~~).*", (DOCS / page).read_text(), re.MULTILINE)
    assert not hidden, f"{page}: nothing finds blocks that are indented, or fenced by ~~~"
    for fence in fences(page):
        assert fence.language in OPTIONS, f"{fence.place}: nothing checks {fence.language!r} blocks"
        unknown = set(fence.options) - OPTIONS[fence.language]
        assert not unknown, f"{fence.place}: {unknown} mean nothing"
        if fence.language == "text":
            assert not any(line.startswith(("$ ", ">>> ")) for line in fence.code.splitlines()), fence.place
        if fence.language == "console":
            for command in commands(fence):
                assert program_of(command.text) in PROGRAMS, f"{fence.place}: {command.text}"


# Each starts programs of its own, for a minute in all.
@pytest.mark.slow
@pytest.mark.parametrize("page", RUN_PAGES)
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(Path(__file__).with_name("run_page.py")), page, str(tmp_path)],
        env=readers_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout


def program_of(command: str) -> str:
    """The program that a command line starts, behind the variables set for it."""
    words = shlex.split(command)
    return next(word for word in words if "=" not in word)
