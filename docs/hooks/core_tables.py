"""Puts tables of attnplug's own data where a page has their marker, so that each has one source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attnplug.core.interface.ported_names import (
    BACKEND_NAMES,
    BUILDER_NAMES,
    IMPL_NAMES,
    PORTED_PARAMETERS,
    PortedName,
)
from attnplug.core.reasons import REASON_HELP


def ported_names() -> str:
    """The names of vLLM that attnplug refuses, by the class that has them."""
    parameters = {name: PortedName(write) for name, write in PORTED_PARAMETERS.items()}
    sections = {
        "On the backend": BACKEND_NAMES,
        "On the impl": IMPL_NAMES,
        "On the builder": BUILDER_NAMES,
        "As a parameter": parameters,
    }
    return "\n".join(f"### {title}\n\n{_table(names)}" for title, names in sections.items())


def _table(names: Mapping[str, PortedName]) -> str:
    by_remedy: dict[str, list[str]] = {}
    for name, ported in names.items():
        allowed = f" (unless {', '.join(map(repr, ported.harmless))})" if ported.harmless else ""
        by_remedy.setdefault(ported.write, []).append(f"`{name}`{allowed}")
    rows = (f"| {', '.join(found)} | {write} |\n" for write, found in by_remedy.items())
    return "| name | do this |\n|---|---|\n" + "".join(rows)


def reason_codes() -> str:
    """Each reason code: a sentence that one sees, the cause, and what to do."""
    parts = []
    for code, each in REASON_HELP.items():
        title = "feature.&lt;name&gt;" if code == "feature" else code
        steps = "".join(f"* {step}\n" for step in each.steps)
        parts.append(f"### {title} {{ #{code} }}\n\n```text\n{each.seen}\n```\n\n{each.why}\n\n{steps}")
    return "\n".join(parts)


TABLES: Mapping[str, Callable[[], str]] = {
    "<!-- ported names -->": ported_names,
    "<!-- reason codes -->": reason_codes,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its tables in place of their markers."""
    for marker, table in TABLES.items():
        if marker in markdown:
            markdown = markdown.replace(marker, table())
    return markdown
