"""The matrix as Markdown: tables that any renderer reads, and texts that stay texts."""

from __future__ import annotations

import re

import pytest
from synthetic_matrix import finding, hostile_matrix, joined_matrix, run, synthetic_matrix

from attnplug.matrix import Matrix, Status
from attnplug.matrix.markdown import markdown_text, render_markdown


def test_a_feature_has_the_answer_of_each_backend_in_its_row() -> None:
    text = render_markdown(synthetic_matrix())
    assert "|  | TORCH | TRITON | FLASH_ATTN_2 | FLASHINFER |\n|---|---|---|---|---|\n" in text
    assert (
        "| ALiBi | ◐ sampled 24 cells | ◐ sampled\\* 19 cells | ○ declared\\*, prefill only | ✗ refuted 1/12 |\n"
        in text
    )


def test_each_device_has_a_heading_and_what_it_was_run_with() -> None:
    text = render_markdown(synthetic_matrix(), level=3)
    assert re.findall(r"^### (.*)$", text, re.MULTILINE) == ["cpu (AMD EPYC 9654)", "sm90 (NVIDIA H200)"]
    assert re.findall(r"^#### (.*)$", text, re.MULTILINE) == ["Refuted", "Not run"]
    with_what = "python 3.12.3, torch 2.11.0, triton 3.6.0"
    assert f"| TORCH | attnplug 0.1.0 | {with_what} | 2026-11-21 | 519 verified, 72 refused |" in text


def test_answers_of_another_run_name_its_card_or_its_versions() -> None:
    text = render_markdown(joined_matrix())
    assert "## sm90 (NVIDIA H100, NVIDIA H200)\n" in text
    with_what = "python 3.12.3, torch 2.11.0, triton 3.6.0"
    assert (
        f"| TRITON | attnplug 0.1.0 | NVIDIA H100, {with_what} | 2026-11-25 | 3 verified, 1 declared |\n"
        f"| TRITON, also | attnplug 0.1.0 | NVIDIA H200, {with_what} | 2026-11-28 | 2 verified: plain, sinks |\n"
        "| TRITON, also | attnplug 0.1.0 | triton 3.7.1 | 2026-11-27 | 2 compiled: soft cap, ALiBi |\n"
        f"| ACME | attnplug-acme 0.1.0 | NVIDIA H200, {with_what} | 2026-11-28 | 1 verified |\n"
    ) in text
    assert "|  | TRITON | ACME (attnplug-acme) |\n" in text
    assert "| plain | ◐ sampled 4 cells, also on NVIDIA H200 | not asked |\n" in text
    assert "| sinks | ◐ sampled 1 cell, on NVIDIA H200 | ◐ sampled 1 cell |\n" in text
    assert "| soft cap | ◉ compiled, with triton 3.7.1 | not asked |\n" in text
    # Of a list only a value that no cell of the run itself has.
    assert "dtypes | ◐ sampled: bfloat16 (5/7)<br>◉ compiled: float16 (with triton 3.7.1) |" in text


def test_values_of_the_other_axes_are_listed_by_status() -> None:
    text = render_markdown(synthetic_matrix())
    assert "| head sizes | ◐ sampled: 16, 32, 64, 80, 96, 112, 128, 192, 256, 576 |" in text
    assert "◐ sampled: 64, 256 (10/21)<br>✗ refuted: 128 (1/145)<br>– refused: 16, 32" in text  # noqa: RUF001


def test_what_was_not_run_says_so_and_a_missing_date_leaves_a_dash() -> None:
    text = render_markdown(Matrix((run(finding(Status.DECLARED), date="", distribution=None, version=None),)))
    assert "| TORCH | \\- | nothing | \\- | 1 declared |" in text


def test_who_serves_nothing_on_a_device_has_no_column_but_a_reason() -> None:
    refused = run(finding(Status.REFUSED, "cpu is not cuda"), backend="FLASHINFER")
    text = render_markdown(Matrix((refused,)))
    assert "### Serves nothing there\n\n- FLASHINFER: cpu is not cuda\n" in text
    assert "plain" not in text


def test_a_value_that_one_backend_was_not_asked_for_says_so() -> None:
    other = run(finding(Status.VERIFIED, feature="novel"), backend="ACME")
    assert "| novel | not asked | ◐ sampled 1 cell |" in render_markdown(
        Matrix((run(finding(Status.VERIFIED)), other))
    )


def test_an_empty_matrix_is_an_empty_text() -> None:
    assert render_markdown(Matrix(())) == ""


@pytest.mark.parametrize(
    "matrix",
    [synthetic_matrix(), hostile_matrix(), joined_matrix()],
    ids=["synthetic", "hostile", "joined"],
)
def test_every_row_of_a_table_has_as_many_cells_as_its_head(matrix: Matrix) -> None:
    tables = [part for part in render_markdown(matrix).split("\n\n") if part.startswith("|")]
    assert tables
    for table in tables:
        bars = [len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()]
        assert len(set(bars)) == 1, table


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        (
            "head_size not supported: 80 is not one of 64, 128",
            "head_size not supported: 80 is not one of 64, 128",
        ),
        ("_one_ *two* `three`", r"\_one\_ \*two\* \`three\`"),
        ("a | b", r"a \| b"),
        ("[text](address)", r"\[text\](address)"),
        ("<b> & </b>", "&lt;b&gt; &amp; &lt;/b&gt;"),
        ("# no heading", r"\# no heading"),
        ("- no list", r"\- no list"),
        ("1. no list", r"1\. no list"),
        ("two\nlines", "two lines"),
    ],
)
def test_a_text_is_shown_as_it_stands(text: str, escaped: str) -> None:
    assert markdown_text(text) == escaped
