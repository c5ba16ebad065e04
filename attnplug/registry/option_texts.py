"""Options as text: `NAME.option=value` in ATTNPLUG_OPTIONS and on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from attnplug.core.errors import PolicyError
from attnplug.registry.option_values import as_tuples

VARIABLE = "ATTNPLUG_OPTIONS"
_FORM = "must be NAME.option=value, or option=value for the one backend asked for"
# A comma inside a value, such as [1, 2], is followed by no name and no equals sign.
_BETWEEN = re.compile(r",(?=\s*[A-Za-z_][\w.+@-]*=)")


def parse_options(texts: Iterable[str], source: str, asked: str | None) -> dict[str, dict[str, Any]]:
    """Options by backend name, as `attnplug.select` takes them.

    Args:
        texts: each one option. The value is read as JSON, such as 4, true, null or [1, 2], and else as text.
        source: the variable or option that gave the texts, for messages.
        asked: the one backend that is asked for, or None.

    Raises:
        PolicyError: text of another form, an option given twice, or none that says which backend is meant.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, equals, value = text.strip().partition("=")
        backend, dot, option = name.rpartition(".")
        if not equals or not option.isidentifier() or (dot and not backend):
            raise PolicyError(source, text, _FORM)
        backend = backend or asked or ""
        if not backend:
            raise PolicyError(
                source, text, "names no backend, and no single one is asked for", f"write NAME.{text}"
            )
        given = found.setdefault(backend, {})
        if option in given:
            raise PolicyError(source, text, f"sets {backend}.{option} a second time")
        given[option] = _value(value)
    return found


def split_options(text: str) -> list[str]:
    """The options in the text of ATTNPLUG_OPTIONS, which has commas between them."""
    return _BETWEEN.split(text) if text.strip() else []


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    # An option must be hashable, and a list is not.
    return as_tuples(value)
