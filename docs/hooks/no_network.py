"""Fails a strict build where a page would fetch anything from elsewhere when it is read."""

from __future__ import annotations

import logging
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.no_network")

_FETCHED_BY_CSS = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)
_LOADING_RELATIONS = {"stylesheet", "preload", "prefetch", "preconnect", "dns-prefetch", "icon", "manifest"}

MERMAID = "https://unpkg.com/mermaid"
"""Material's own script fetches it for each diagram of this class."""


class _Loads(HTMLParser):
    """Collects the addresses that a browser fetches by itself; links that a reader follows are no such."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        relations = set((given.get("rel") or "").split())
        if "mermaid" in (given.get("class") or "").split():
            self.found.append(MERMAID)
        if tag == "link" and relations & _LOADING_RELATIONS:
            self._note(given.get("href"))
        elif tag != "a":
            for name in ("src", "srcset", "poster", "data"):
                self._note(given.get(name))

    def _note(self, address: str | None) -> None:
        if address and address.lower().startswith(("http:", "https:", "//")):
            self.found.append(address)


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Warns of each address; a strict build then fails."""
    for address in loads(output):
        log.warning("%s fetches %s when it is read", page.file.src_path, address)
    return output


def on_post_build(*, config: Any, **_: Any) -> None:
    """The same for pages that are no Markdown (404.html) and for our own style sheets."""
    site = Path(config["site_dir"])
    for address in loads((site / "404.html").read_text(encoding="utf-8")):
        log.warning("404.html fetches %s when it is read", address)
    for name in config["extra_css"]:
        for address in _FETCHED_BY_CSS.findall((site / name).read_text(encoding="utf-8")):
            log.warning("%s fetches %s when a page is read", name, address)


def loads(html: str) -> list[str]:
    """The addresses of other sites that a browser fetches for this page."""
    parser = _Loads()
    parser.feed(html)
    return parser.found
