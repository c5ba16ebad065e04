"""Writes the JSON schemas of the package from the tables of reference/json.md: `python docs/json_schemas.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "reference" / "json.md"
FOLDER = Path(__file__).parents[1] / "attnplug" / "schemas"
DRAFT = "https://json-schema.org/draft/2020-12/schema"
_ROW = re.compile(r"^\| `(\w+)` \| ([^|]+?) \| ([^|]*?) ?\|$", re.MULTILINE)
_PLAIN = {"text": "string", "integer": "integer", "number": "number", "boolean": "boolean", "null": "null"}
_VERSION = 1


def described() -> dict[str, dict[str, tuple[str, str]]]:
    """The type and the meaning of each field of each section."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {
        each.partition("\n")[0]: {name: (kind, words) for name, kind, words in _ROW.findall(each)}
        for each in sections
    }


def documents() -> list[str]:
    """The names of all schemas, such as "attnplug.list"."""
    return [name for name in described() if name.startswith("attnplug.")]


def schema_of(name: str, *, strict: bool = False) -> dict[str, Any]:
    """The schema of a document; a strict one allows no field that the page lacks, as a test of the page wants it."""
    defs: dict[str, Any] = {}
    page = described()

    def of_kind(kind: str) -> dict[str, Any]:
        if kind in _PLAIN:
            return {"type": _PLAIN[kind]}
        if kind == "anything":
            return {}
        if " or " in kind and not kind.startswith(("list of", "map of")):
            return {"anyOf": [of_kind(each) for each in kind.split(" or ")]}
        if kind.endswith(" or null"):
            return {"anyOf": [of_kind(kind.removesuffix(" or null")), {"type": "null"}]}
        if kind.startswith("list of "):
            return {"type": "array", "items": of_kind(kind.removeprefix("list of "))}
        if kind.startswith("map of "):
            return {"type": "object", "additionalProperties": of_kind(kind.removeprefix("map of "))}
        if kind not in defs:
            defs[kind] = {}  # a kind may contain itself
            defs[kind] = of_section(kind, names_itself=kind.startswith("attnplug."))
        return {"$ref": f"#/$defs/{kind}"}

    def of_section(section: str, *, names_itself: bool) -> dict[str, Any]:
        about = {"schema": {"const": section}, "version": {"const": _VERSION}} if names_itself else {}
        fields = {
            field: of_kind(kind.removesuffix(", optional")) | ({"description": words} if words else {})
            for field, (kind, words) in page[section].items()
        }
        needed = [field for field, (kind, _) in page[section].items() if not kind.endswith(", optional")]
        closed = {"additionalProperties": False} if strict else {}
        found = {"type": "object", "required": [*about, *needed], "properties": {**about, **fields}}
        return found | closed

    body = of_section(name, names_itself=True)
    if name == "attnplug.show":
        # The document of a family has a list of such objects, without their schema and version.
        defs[name] = of_section(name, names_itself=False)
        about = {each: body["properties"][each] for each in ("schema", "version")}
        family = {**about, "backends": {"type": "array", "items": {"$ref": f"#/$defs/{name}"}}}
        body = {"anyOf": [body, {"type": "object", "required": [*family], "properties": family}]}
    return {"$schema": DRAFT, "title": f"{name}, version {_VERSION}", **body, "$defs": defs}


def text_of(schema: dict[str, Any]) -> str:
    """A schema as text, with a line for each field and each definition."""
    lines = []
    for key, value in schema.items():
        inner = (
            ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in value.items())
            if isinstance(value, dict) and value
            else ""
        )
        lines.append(f'"{key}": ' + (f"{{\n{inner}\n}}" if inner else json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in documents():
        (FOLDER / f"{each}.json").write_text(text_of(schema_of(each)), encoding="utf-8")
