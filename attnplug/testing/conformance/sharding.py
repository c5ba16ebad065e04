"""Part of the checks: one of several disjoint parts, or those whose ids match."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Iterable, Sequence

from attnplug.core.errors import PolicyError
from attnplug.testing.conformance.known_failures import nearest

__all__ = ["Shard", "matching"]


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` parts of the checks, numbered from 1; the parts are disjoint and together all."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read "I/N". PolicyError for anything else, or where I is not from 1 to N."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise PolicyError("--shard", text, "must be I/N with I from 1 to N", "as 1/4")
        return cls(int(found[1]), int(found[2]))

    def of(self, ids: Sequence[str]) -> list[str]:
        """This part of `ids`: every N-th, so that like checks spread over the parts."""
        return list(ids[self.index - 1 :: self.count])

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def matching(ids: Sequence[str], patterns: Iterable[str], source: str) -> list[str]:
    """The ids that are, or match, one of `patterns`, in their order; PolicyError for one that matches none."""
    chosen: set[str] = set()
    for pattern in patterns:
        found = [pattern] if pattern in ids else fnmatch.filter(ids, pattern)
        if not found:
            raise PolicyError(source, pattern, "matches no check", nearest(pattern, ids))
        chosen.update(found)
    return [each for each in ids if each in chosen]
