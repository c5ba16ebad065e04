"""The fenced blocks of a documentation page, and the commands in them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

__all__ = ["DOCS", "PAGES", "ROOT", "Command", "Fence", "commands", "fences"]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))

_FENCE = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1[ \t]*$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"((?:[^\n]*\\\n)*[^\n]*)\n?(.*)", re.DOTALL)
_OPTION = re.compile(r'([\w-]+)="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Fence:
    """One block: `options` are the pairs that stand behind its language, `line` the first line of its code."""

    page: str
    line: int
    language: str
    options: dict[str, str]
    code: str

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return f"{self.page}:{self.line}"


@dataclasses.dataclass(frozen=True)
class Command:
    """One `$ command` with the output shown below it."""

    text: str
    shown: str


def fences(page: str) -> list[Fence]:
    """The blocks of a page under docs/, in order."""
    text = (DOCS / page).read_text()
    found = []
    for match in _FENCE.finditer(text):
        language, _, rest = match[2].strip().partition(" ")
        if rest and not re.fullmatch(r"\{ .* \}", rest):
            raise ValueError(f"{page}: ```{match[2]} is shown as text; write ```{language} {{ {rest} }}")
        line = text.count("\n", 0, match.start(3)) + 1
        found.append(Fence(page, line, language, dict(_OPTION.findall(rest)), match[3]))
    return found


def commands(fence: Fence) -> list[Command]:
    """The commands of a console block; one may go on behind a backslash."""
    before, *parts = re.split(r"^\$ ", fence.code, flags=re.MULTILINE)
    if before.strip() or not parts:
        raise ValueError(f"{fence.place}: a console block must begin with `$ `")
    found = []
    for part in parts:
        match = _COMMAND.match(part)
        assert match, fence.place
        found.append(Command(match[1].replace("\\\n", " "), match[2]))
    return found
