"""Puts tables of attnplug's own data where a page has their marker, so that each has one source."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attnplug.core import Feature
from attnplug.core.interface.ported_names import (
    BACKEND_NAMES,
    BUILDER_NAMES,
    IMPL_NAMES,
    PORTED_PARAMETERS,
    PortedName,
)
from attnplug.core.reasons import REASON_HELP

KNOWN_PLUGINS = Path(__file__).parents[2] / "attnplug/registry/plugins/known_plugins.toml"


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
        name, why = code, each.why
        if code == "feature":
            name = "feature.&lt;name&gt;"
            # The other features have codes of their own.
            names = [feature.names()[0] for feature in Feature if not feature.ask.code]
            why += f" The sentences are {', '.join(f'`{each} not supported`' for each in names)}."
        # The search looks in titles first, so the sentence of a refusal is there, up to its values.
        sentence = code if each.seen.startswith("(") else re.split("[:;]", each.seen)[0]
        title = sentence if sentence.startswith(code) else f"{name}: {sentence}"
        attributes = f'{{ #{code} data-toc-label="{code}" }}'
        steps = "".join(f"* {step}\n" for step in each.steps)
        parts.append(f"### {title} {attributes}\n\n```text\n{each.seen}\n```\n\n{why}\n\n{steps}")
    return "\n".join(parts)


def known_plugins() -> str:
    """The packages that `attnplug list --known` shows, with links to their sources."""
    rows = []
    for name, each in tomllib.loads(KNOWN_PLUGINS.read_text(encoding="utf-8")).items():
        source = (
            f"[`{name}`]({each['at']})"
            if each["at"].startswith("https://")
            else f"`{name}`, in `{each['at']}`"
        )
        rows.append(
            f"| {source} | {', '.join(f'`{backend}`' for backend in each['backends'])} | {each['summary']} "
            f"| `pip install {each['install']}` | {each['by']} |\n"
        )
    return "| package | backends | runs | install | by |\n|---|---|---|---|---|\n" + "".join(rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "<!-- ported names -->": ported_names,
    "<!-- known plugins -->": known_plugins,
    "<!-- reason codes -->": reason_codes,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with its tables in place of their markers."""
    for marker, table in TABLES.items():
        if marker in markdown:
            markdown = markdown.replace(marker, table())
    return markdown
