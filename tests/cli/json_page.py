"""Compares JSON with the descriptions of docs/reference/json.md, and with the schemas that are written from them."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import extend

DOCS = Path(__file__).resolve().parents[2] / "docs"
sys.path.insert(0, str(DOCS))
try:
    import json_schemas
finally:
    sys.path.remove(str(DOCS))

described = functools.cache(json_schemas.described)
# JSON Schema takes 1.0 for an integer, and no document has one.
_types = Draft202012Validator.TYPE_CHECKER.redefine("integer", lambda checker, value: type(value) is int)
_Validator = extend(Draft202012Validator, type_checker=_types)


@functools.cache
def _validators(name: str) -> tuple[Any, Any]:
    """Of the page, without other fields; and of the package's file."""
    packaged = json.loads((json_schemas.FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return _Validator(json_schemas.schema_of(name, strict=True)), _Validator(packaged)


def check_document(data: Any) -> None:
    """AssertionError with the place of what the page and the schema in the package do not describe."""
    assert data["schema"] in described(), data["schema"]
    for validator in _validators(data["schema"]):
        problems = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(data)]
        assert not problems, "\n".join(problems)
