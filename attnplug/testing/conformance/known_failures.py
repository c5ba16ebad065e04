"""Known failures: which checks may fail, and why; a mapping in code, or a TOML file."""

from __future__ import annotations

import difflib
import fnmatch
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from attnplug.core.errors import PolicyError

__all__ = ["checked_reasons", "known_reasons", "nearest", "read_known_failures"]

_TABLE = "known_failures"


def checked_reasons(given: Mapping[str, str], source: str) -> dict[str, str]:
    """`given`, where every key is a check id or pattern and every value says why it fails.

    Args:
        given: reason by id; `*`, `?` and `[...]` in an id stand for any text, as in fnmatch.
        source: where it comes from, for messages.

    Raises:
        PolicyError: something that is no mapping of text to text, or an empty id or reason.
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
        PolicyError: a file that cannot be read, is no TOML, or holds anything else.
    """
    source = "--known-failures"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        why = getattr(problem, "strerror", None) or "it is no UTF-8 text"
        raise PolicyError(source, str(path), f"cannot be read: {why}") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise PolicyError(source, str(path), f"is no TOML: {problem}") from None
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
    """The reason of each check that is known to fail; an id counts before a pattern, then the first one.

    Args:
        known: reason by id or pattern.
        ids: of all checks.
        source: where `known` comes from, for messages.
        elsewhere: ids that may be named although they are not among `ids`, as those of the other level;
            asked only where they are needed.

    Raises:
        PolicyError: an id or pattern that matches no check; it names the nearest ids.
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
    """A remedy that names the ids most like `wanted`, or what ids look like; None where there are none."""
    found = difflib.get_close_matches(wanted, list(dict.fromkeys(ids)), 3, 0.5)
    if found:
        return f"did you mean {' or '.join(found)}?"
    return f"ids look like {ids[0]}" if ids else None
