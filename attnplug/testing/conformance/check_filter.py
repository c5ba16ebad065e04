"""Choose checks by id: shards, patterns, and known failures from a mapping or a TOML file."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from attnplug.core.errors import PolicyError
from attnplug.registry.plugins.project import read_toml, read_toml_text

_TABLE = "known_failures"


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` disjoint parts of the checks, numbered from 1; together they are all checks."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read "I/N"; PolicyError for any other text, or if I is not from 1 to N."""
        found = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text.strip())
        if not found or not 1 <= int(found[1]) <= int(found[2]):
            raise PolicyError("--shard", text, "must be I/N with I from 1 to N", "such as 1/4")
        return cls(int(found[1]), int(found[2]))

    def of(self, ids: Sequence[str]) -> list[str]:
        """This part of `ids`: every N-th, so that similar checks are spread over the parts."""
        return list(ids[self.index - 1 :: self.count])

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def matching(ids: Sequence[str], patterns: Iterable[str], source: str) -> list[str]:
    """The ids that equal or match one of `patterns`, in the order of `ids`.

    Raises:
        PolicyError: a pattern matches no id; the error names the nearest ids and `source`.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        found = [pattern] if pattern in ids else fnmatch.filter(ids, pattern)
        if not found:
            raise PolicyError(source, pattern, "matches no check", nearest(pattern, ids))
        chosen.update(found)
    return [each for each in ids if each in chosen]


def checked_reasons(given: Mapping[str, str], source: str) -> dict[str, str]:
    """A copy of `given` with normalised reasons, after checking its keys and values.

    Args:
        given: reason by id; an id may be a pattern of fnmatch, with `*`, `?` and `[...]`.
        source: the name of the argument or file, for messages.

    Raises:
        PolicyError: not a mapping of text to text, or an empty id or reason.
    """
    if not isinstance(given, Mapping):
        raise PolicyError(source, given, "must be a mapping of check id to reason")
    for pattern, reason in given.items():
        if not isinstance(pattern, str) or not pattern.strip():
            raise PolicyError(source, pattern, "must be the id of a check, or a pattern of ids")
        if not isinstance(reason, str) or not reason.strip():
            remedy = "say why it fails, with a link to the report where there is one"
            raise PolicyError(f"{source}[{pattern!r}]", reason, "is no reason: it must be a text", remedy)
    return {pattern: " ".join(reason.split()) for pattern, reason in given.items()}


def read_known_failures(path: Path) -> dict[str, str]:
    """The table `[known_failures]` of a TOML file: `"correct/decode-*" = "reason"`.

    Raises:
        PolicyError: the file cannot be read, is not TOML, or has anything but this table.
    """
    source = "--known-failures"
    data = read_toml(path, source, read_toml_text(path, source))
    for key in data:
        if key != _TABLE:
            limit = f"has a key {key!r}; the only one known is the table [{_TABLE}]"
            raise PolicyError(source, str(path), limit)
    if _TABLE not in data:
        raise PolicyError(source, str(path), f"has no table [{_TABLE}]", "write '[known_failures]' above it")
    return checked_reasons(data[_TABLE], f"{path}: {_TABLE}")


def known_reasons(
    known: Mapping[str, str],
    ids: Sequence[str],
    *,
    source: str,
    elsewhere: Callable[[], Iterable[str]] | None = None,
) -> dict[str, str]:
    """The reason of each check that is known to fail; an exact id wins over a pattern, then the first entry.

    `elsewhere` returns further valid ids, such as those of the other level; it is called only if needed.

    Raises:
        PolicyError: an id or pattern matches no check; the error names the nearest ids.
    """
    every = set(ids)
    reasons: dict[str, str] = {}
    unmatched = []
    for pattern, reason in sorted(known.items(), key=lambda item: item[0] not in every):
        matched = [pattern] if pattern in every else fnmatch.filter(ids, pattern)
        for each in matched:
            reasons.setdefault(each, reason)
        if not matched:
            unmatched.append(pattern)
    others = list(elsewhere()) if unmatched and elsewhere is not None else []
    for pattern in unmatched:
        if not fnmatch.filter(others, pattern):
            raise PolicyError(source, pattern, "matches no check", nearest(pattern, [*ids, *others]))
    return reasons


def nearest(wanted: str, ids: Sequence[str]) -> str | None:
    """A remedy that names the ids most similar to `wanted`, or an example; None without ids."""
    found = difflib.get_close_matches(wanted, list(dict.fromkeys(ids)), 3, 0.5)
    if found:
        return f"did you mean {' or '.join(found)}?"
    return f"ids look like {ids[0]}" if ids else None
