"""Sentences of Markdown pages, docstrings and help texts, and the habits that make them hard to read."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["MOST_WORDS", "habits", "paragraphs", "sentences"]

MOST_WORDS = 25

_NOT_PROSE = re.compile(
    r"\A---\n.*?^---$|^(```+).*?^\1\s*$|<!--.*?-->|<(?:svg|pre)\b.*?</(?:svg|pre)>", re.M | re.S
)
_PICTURE = re.compile(r"!\[([^\]]*)\]\([^)]*\)(?:\{[^}]*\})?")
_LINK = re.compile(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])(?:\{[^}]*\})?")
_OPENER = re.compile(r"(?:What|Who|Whoever|Whichever|Whatever|Those|Nothing|Of) ")
_WORDS = re.compile(
    r"\b(stands? (?:for|in|on|at|there|under|beside|before|behind)|doors?|anew|whoever|whichever of|thereof|therein|lest|"
    r"(?:is|are|was|were) (?:told|asked)|behind your back|all the same|as it stands|charged to|of the user's|"
    r"none of it|alike|besides)\b",
    re.I,
)


def paragraphs(markdown: str) -> Iterator[str]:
    """The paragraphs, list items, headings and table cells of a page, each in one line; code is the word `x`."""
    text = re.sub(r"`[^`\n]+`", "x", _NOT_PROSE.sub("\n\n", markdown))
    # Pictures follow each other in lines of their own: each has a text of its own.
    text = re.sub(r"<[^>\n]*>", " ", _LINK.sub(r"\1", _PICTURE.sub(r"\1\n\n", text)))
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[*-] |\d+\. |\||#))", text):
        # One row of a table, or one item, which may go on in further lines.
        cells = block.strip().strip("|").split(" | ") if block.lstrip().startswith("|") else [block]
        for cell in cells:
            words = re.sub(r"^\s*(?:[*-]|\d+\.|#+|!!!|:::)\s+", "", cell)
            yield re.sub(r"\s+", " ", words.replace("**", "")).strip()


def sentences(paragraph: str) -> list[str]:
    """The parts of a paragraph that end in a full stop, question mark, exclamation mark, colon or semicolon."""
    return re.split(r"(?<=[.!?:;])\s+", paragraph)


def habits(sentence: str) -> list[str]:
    """Why a reader may stumble over a sentence; empty if nothing is known against it."""
    found = []
    # Numbers are no words: a cell may list many sizes.
    count = sum(bool(re.search(r"[^\W\d]", word)) for word in sentence.split())
    if count > MOST_WORDS:
        found.append(f"{count} words")
    if not sentence.endswith("?") and (match := _OPENER.match(sentence)):
        found.append(f"begins with {match[0].strip()!r}")
    found += (repr(match[0]) for match in _WORDS.finditer(sentence))
    return found
