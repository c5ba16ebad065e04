"""A goal of a benchmark, as it is printed."""

from __future__ import annotations

import dataclasses

__all__ = ["Goal"]


@dataclasses.dataclass(frozen=True)
class Goal:
    """One goal: what it is, the figure found or None, the limit in words, and whether it is met."""

    name: str
    value: str | None
    limit: str
    met: bool | None

    def __str__(self) -> str:
        word = {True: "met", False: "MISSED", None: "not measured"}[self.met]
        return f"{word:13} {self.name}: {self.value or '-'} ({self.limit})"
