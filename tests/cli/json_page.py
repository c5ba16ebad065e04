"""Reads the descriptions of docs/reference/json.md, and compares JSON with them."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "json.md"
_PLAIN = {
    "text": lambda value: type(value) is str,
    "integer": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "boolean": lambda value: type(value) is bool,
    "null": lambda value: value is None,
    "anything": lambda value: True,
}


@functools.cache
def described() -> dict[str, dict[str, str]]:
    """The type of each field of each section."""
    found = {}
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        found[title] = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", section, re.MULTILINE))
        assert found[title], title
    return found


def check_document(data: Any) -> None:
    """AssertionError with the place of what the page does not describe."""
    assert data["schema"] in described(), data["schema"]
    _check(data, data["schema"], data["schema"])


def _check(value: Any, kind: str, place: str) -> None:
    if kind in _PLAIN:
        assert _PLAIN[kind](value), f"{place} is {value!r}, not {kind}"
    elif " or " in kind and not kind.startswith(("list of", "map of")):
        _check_one_of(value, kind.split(" or "), place)
    elif kind.endswith(" or null"):
        _ = value is None or _check(value, kind.removesuffix(" or null"), place)
    elif kind.startswith("list of "):
        assert isinstance(value, list), f"{place} is no list"
        for index, each in enumerate(value):
            _check(each, kind.removeprefix("list of "), f"{place}[{index}]")
    elif kind.startswith("map of "):
        assert isinstance(value, dict), f"{place} is no object"
        for name, each in value.items():
            _check(each, kind.removeprefix("map of "), f"{place}.{name}")
    else:
        _check_object(value, kind, place)


def _check_one_of(value: Any, kinds: list[str], place: str) -> None:
    problems = []
    for kind in kinds:
        try:
            return _check(value, kind, place)
        except AssertionError as problem:
            problems.append(str(problem))
    raise AssertionError("; ".join(problems))


def _check_object(value: Any, kind: str, place: str) -> None:
    fields = described()[kind]
    assert isinstance(value, dict), f"{place} is no object"
    about = {"schema", "version"} if kind.startswith("attnplug.") else set()
    if about:
        assert (value["schema"], value["version"]) == (kind, 1), place
    optional = {name for name, each in fields.items() if each.endswith(", optional")}
    assert value.keys() - about <= fields.keys(), f"{place}: {value.keys() - about - fields.keys()}"
    assert value.keys() >= fields.keys() - optional, (
        f"{place} lacks {fields.keys() - optional - value.keys()}"
    )
    for name in value.keys() - about:
        _check(value[name], fields[name].removesuffix(", optional"), f"{place}.{name}")
