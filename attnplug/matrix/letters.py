"""A letter for each backend, where a layer has room for no more: in the terminal's strip and on the page of models."""

from __future__ import annotations

from collections.abc import Iterable

NO_BACKEND = "none"
"""The name that stands for no backend; its letter is "-"."""


def letters(names: Iterable[str]) -> dict[str, str]:
    """A letter or digit for each name, the same for the same set of names: its last digit, or its first free letter."""
    found = {NO_BACKEND: "-"}
    # Numbered names first: the digit is what tells them apart. The others then share out the letters.
    for name in sorted(set(names) - {NO_BACKEND}, key=lambda name: (not name[-1].isdigit(), name)):
        wanted = name[-1] + name if name[-1].isdigit() else name
        free = (sign for sign in wanted.upper() if sign.isalnum() and sign not in found.values())
        anything = (chr(code) for code in range(ord("!"), ord("\x7f")) if chr(code) not in found.values())
        found[name] = next(free, None) or next(anything, "?")
    return found
