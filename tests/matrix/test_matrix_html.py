"""The page as a file: whole by itself, small, and with no way out for a text of a plugin."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from synthetic_matrix import HOSTILE, finding, hostile_matrix, run, synthetic_matrix

from attnplug.matrix import Matrix, Status
from attnplug.matrix.html import page_data, render_html
from attnplug.matrix.words import AXIS_NAMES

MATRICES = pytest.mark.parametrize(
    "matrix", [Matrix(()), synthetic_matrix(), hostile_matrix()], ids=["empty", "synthetic", "hostile"]
)


class Document(HTMLParser):
    """The elements of a page with their attributes, and the texts of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": [], "title": []}
        self._inside: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in self.texts:
            self.texts[tag].append("")
            self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self.texts[self._inside][-1] += data


def data_of(text: str) -> Any:
    return json.loads(Document(text).texts["script"][0])


def findings_of(data: Any) -> list[tuple[str, str, tuple[object, ...], str, tuple[str, ...]]]:
    """Backend, device, values, status and reasons of each finding, as a reader of the page's data sees them."""
    found = []
    width = len(data["axes"])
    for each in data["runs"]:
        numbers = each["findings"]
        for cell, status, why in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
            values = data["cells"][cell * width : (cell + 1) * width]
            spelled = tuple(axis["values"][value] for axis, value in zip(data["axes"], values, strict=True))
            reasons = tuple(data["reasons"][reason] for reason in data["whys"][why])
            found.append(
                (each["backend"], each["device"], spelled, data["statuses"][status]["word"], reasons)
            )
    return found


@MATRICES
def test_the_data_of_the_page_holds_every_finding_as_it_is(matrix: Matrix) -> None:
    expected = [
        (
            each.backend,
            each.device,
            tuple(getattr(found.cell, axis) for axis in AXIS_NAMES),
            str(found.status),
            found.why,
        )
        for each in matrix.runs
        for found in each.findings
    ]
    assert findings_of(data_of(render_html(matrix))) == expected


@MATRICES
def test_the_page_fetches_nothing(matrix: Matrix) -> None:
    text = render_html(matrix)
    for tag, attributes in Document(text).elements:
        assert tag not in {
            "link",
            "iframe",
            "object",
            "embed",
            "base",
            "img",
            "form" if "action" in attributes else "",
        }
        assert not attributes.keys() & {"src", "srcset", "background", "ping", "data", "poster"}
        assert (attributes.get("href") or "#").startswith("#")
    code = "".join(Document(text).texts["style"]) + "".join(Document(text).texts["script"][1:])
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|sendBeacon|import\(|\beval\(", code)


@MATRICES
def test_the_policy_allows_the_scripts_and_styles_of_the_page_and_nothing_else(matrix: Matrix) -> None:
    document = Document(render_html(matrix))
    (policy,) = (
        attributes["content"]
        for tag, attributes in document.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for kind, text in (
        ("style-src", document.texts["style"][0]),
        ("script-src", document.texts["script"][1]),
    ):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules.pop(kind) == f"'sha256-{digest}'"
    assert rules == {"default-src": "'none'", "base-uri": "'none'", "form-action": "'none'"}


@MATRICES
def test_no_text_of_a_plugin_becomes_an_element(matrix: Matrix) -> None:
    expected = [tag for tag, _ in Document(render_html(Matrix(()))).elements]
    assert [tag for tag, _ in Document(render_html(matrix)).elements] == expected


def test_texts_of_a_plugin_stand_in_the_data_only() -> None:
    before, _, rest = render_html(hostile_matrix()).partition('<script type="application/json" id="data">')
    data, _, after = rest.partition("</script>")
    assert "onerror" not in before + after
    assert not set(data) & set("<>&\u2028\u2029")
    assert HOSTILE in json.loads(data)["reasons"]


def test_the_title_is_a_text() -> None:
    text = render_html(Matrix(()), title="<b>1 & 2</b> @@data@@")
    assert Document(text).texts["title"] == ["<b>1 & 2</b> @@data@@"]
    assert text.count("<b>") == 0


def test_ten_thousand_cells_are_less_than_a_megabyte() -> None:
    matrix = synthetic_matrix(10_000)
    assert sum(len(each.findings) for each in matrix.runs) >= 10_000
    assert len(render_html(matrix).encode()) < 1_000_000


def test_a_text_stands_in_the_data_once() -> None:
    findings = [finding(Status.REFUSED, "the same reason", head_size=size) for size in range(1, 50)]
    assert render_html(Matrix((run(*findings),))).count("the same reason") == 1


def test_what_a_value_is_not_served_with_stands_in_the_data_once() -> None:
    limited = run(
        finding(Status.DECLARED, feature="alibi"),
        finding(Status.DECLARED, head_size=256),
        finding(Status.REFUSED, "not with 256", feature="alibi", head_size=256),
    )
    data = data_of(render_html(Matrix((limited,))))
    axis, value, other, its, why = data["runs"][0]["limits"]
    assert data["axes"][axis]["values"][value] == "alibi"
    assert data["axes"][other]["values"][its] == 256
    assert [data["reasons"][reason] for reason in data["whys"][why]] == ["not with 256"]


def test_the_page_knows_each_status_with_its_mark_and_what_it_means() -> None:
    data = page_data(Matrix(()))
    assert {each["word"] for each in data["statuses"]} == {str(status) for status in Status}
    assert sorted(data["strongest"]) == list(range(len(Status)))
    text = render_html(Matrix(()))
    for status in Status:
        assert f'id="mark-{status.replace(" ", "-")}"' in text
        assert f".is-{status.replace(' ', '-')} {{ --tone" in text


def test_the_page_is_the_same_each_time() -> None:
    assert render_html(synthetic_matrix()) == render_html(synthetic_matrix())
