"""The matrix as one self-contained HTML page, with its data, styles and scripts."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib import resources

from attnplug.matrix.model import Matrix
from attnplug.matrix.page_data import page_data

_SCRIPTS = (
    "data.js",
    "state.js",
    "elements.js",
    "filters.js",
    "overview.js",
    "cells.js",
    "detail.js",
    "main.js",
)


def render_html(matrix: Matrix, *, title: str = "Compatibility matrix") -> str:
    """The HTML document of a page that shows the matrix and filters it, for any recent browser.

    The page fetches nothing: its content security policy allows only its own scripts and styles, by hash.
    Names and reasons reach the document as text only.
    """
    style = _part("matrix.css")
    script = "\n".join(_part(name) for name in _SCRIPTS)
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}"
    values = {
        "policy": html.escape(f"{policy}; base-uri 'none'; form-action 'none'"),
        "title": html.escape(title),
        "style": style,
        "data": _json(page_data(matrix)),
        "script": script,
    }
    # In one pass, so that inserted text is not searched for further "@@".
    pieces = _part("matrix.html").split("@@")
    return "".join(values[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def _part(name: str) -> str:
    return resources.files("attnplug.matrix").joinpath("page", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _json(data: object) -> str:
    """JSON that is safe in a script element: it can neither end the element nor open a comment."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    for each in "<>&\u2028\u2029":
        text = text.replace(each, f"\\u{ord(each):04x}")
    return text
