"""Puts what `attnplug COMMAND --help` prints where a page says `<!-- attnplug help -->`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

MARKER = "<!-- attnplug help -->"
WIDTH = 92


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with a section for each command in place of the marker."""
    if MARKER not in markdown:
        return markdown
    return markdown.replace(MARKER, "\n".join(sections()))


def sections() -> list[str]:
    """The help of the program, and of each of its commands."""
    program = help_of()
    commands = re.findall(r"^  ([a-z][a-z-]*)  ", program.partition("Commands:")[2], re.MULTILINE)
    if not commands:
        raise RuntimeError(f"attnplug --help names no command:\n{program}")
    return [_section("attnplug", program)] + [
        _section(f"attnplug {name}", help_of(name)) for name in commands
    ]


def help_of(*command: str) -> str:
    """What `attnplug ... --help` prints, without rich's boxes, which break where lines have space between them."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("ATTNPLUG_", "FORCE_"))
    }
    done = subprocess.run(  # noqa: S603  (our own interpreter on our own module)
        [sys.executable, "-m", "attnplug", *command, "--help"],
        env={**environment, "TYPER_USE_RICH": "0", "COLUMNS": str(WIDTH), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"attnplug {' '.join(command)} --help ended with {done.returncode}:\n{done.stderr}"
        )
    return done.stdout


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text.strip()}\n```\n"
