"""Lets the copy button of a console block or a Python session take its commands alone, without prompts and output."""

from __future__ import annotations

import doctest
import html
import re
from typing import Any

_BLOCK = re.compile(r'<div class="highlight"([^>]*)>(<pre>.*?</pre>)', re.S)
_COMMAND = re.compile(r"^\$ ((?:[^\n]*\\\n)*[^\n]*)", re.M)


def on_page_content(content: str, **_: Any) -> str:
    """The page whose blocks with prompts name their commands in `data-copy`, which Material's button reads."""
    return _BLOCK.sub(_with_commands, content)


def _with_commands(block: re.Match[str]) -> str:
    found = commands(html.unescape(re.sub(r"<[^>]*>", "", block[2])))
    if not found:
        return block[0]
    # A line break in an attribute is written as its number, so that no later step of the build folds it.
    value = html.escape(found).replace("\n", "&#10;")
    return f'<div class="highlight"{block[1]} data-copy="{value}">{block[2]}'


def commands(text: str) -> str:
    """What a reader pastes: the commands of `$ `, or the statements of `>>> `; empty where there is no prompt."""
    if text.startswith(">>> "):
        sources = [each.source for each in doctest.DocTestParser().get_examples(text)]
        # An empty line ends a block where Python reads line by line.
        return "".join(f"{source}\n" if "\n " in source else source for source in sources).rstrip()
    return "\n".join(_COMMAND.findall(text)) if text.startswith("$ ") else ""
