"""Puts what `attnplug COMMAND --help` prints where a page says `<!-- attnplug help -->`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

MARKER = "<!-- attnplug help -->"
WIDTH = 92

_COMMANDS = "\nCommands:\n"

# Without rich: its boxes break where lines have space between them. `terminal_width` is click's own.
PROGRAM = """
import sys
from attnplug.cli.app import app
app([*sys.argv[1:], "--help"], prog_name="attnplug", terminal_width={width})
"""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with a list of the commands and a section for each in place of the marker."""
    if MARKER not in markdown:
        return markdown
    return markdown.replace(MARKER, commands_page())


def commands_page() -> str:
    """A list of the commands, then the help of the program and of each command."""
    program = help_of()
    options, _, rest = program.partition(_COMMANDS)
    names = subcommands(program)
    if not names:
        raise RuntimeError(f"attnplug --help names no command:\n{program}")
    texts: dict[str, str] = {}
    for name in names:
        texts[name] = help_of(name)
        for sub in subcommands(texts[name]):
            texts[f"{name} {sub}"] = help_of(name, sub)
    rows = [
        f"| [`attnplug {name}`](#attnplug-{name.replace(' ', '-')}) | {summary(text)} |"
        for name, text in texts.items()
    ]
    after = rest.partition("\n\n")[2]
    parts = ["| command | |\n|---|---|", *rows, "", _section("attnplug", f"{options}\n{after}")]
    return "\n".join([*parts, *(_section(f"attnplug {name}", text) for name, text in texts.items())])


def subcommands(text: str) -> list[str]:
    """The commands that a help text lists."""
    return re.findall(r"^  ([a-z][a-z-]*)  ", text.partition(_COMMANDS)[2], re.MULTILINE)


def help_of(*command: str) -> str:
    """What `attnplug ... --help` prints."""
    left_out = ("ATTNPLUG_", "FORCE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    done = subprocess.run(  # noqa: S603  (our own interpreter on our own module)
        [sys.executable, "-c", PROGRAM.format(width=WIDTH), *command],
        env={**environment, "TYPER_USE_RICH": "0", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"attnplug {' '.join(command)} --help ended with {done.returncode}:\n{done.stderr}"
        )
    # A bracket is escaped for rich, which is not there to take the backslash away.
    return done.stdout.replace("\\[", "[")


def summary(text: str) -> str:
    """The first paragraph of a command's help, in one line."""
    return " ".join(text.split("\n\n")[1].split())


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text.strip()}\n```\n"
