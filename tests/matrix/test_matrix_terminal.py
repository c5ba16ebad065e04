"""The matrix in a terminal: wide, narrow, piped, without UTF-8, and with texts that would move the cursor."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from synthetic_matrix import finding, hostile_matrix, run, synthetic_matrix

from attnplug.matrix import Matrix, Status
from attnplug.matrix.terminal import render_terminal


def shown(matrix: Matrix, width: int = 100, *, terminal: bool = False, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="")
    console = Console(file=file, width=width, force_terminal=terminal, no_color=True, highlight=False)
    render_terminal(matrix, console)
    file.flush()
    return raw.getvalue().decode(encoding)


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def test_a_feature_has_the_answer_of_each_backend_in_its_row() -> None:
    text = lines(shown(synthetic_matrix(), width=120))
    assert (
        "                 TORCH                TRITON               FLASH_ATTN_2                   FLASHINFER"
        in text
    )
    sinks = "sinks            ◐ sampled 24 cells   ◐ sampled 20 cells   – refused    "  # noqa: RUF001
    assert any(line.startswith(sinks) and line.endswith("  ◐ sampled 2 of 3 head sizes") for line in text)
    alibi = "ALiBi            ◐ sampled 24 cells   ◐ sampled* 19 cells  ○ declared*, prefill only      ✗ refuted 1/12"
    assert alibi in text


def test_a_feature_that_is_served_with_one_value_only_says_so() -> None:
    storage = [("fp8_e4m3", Status.REFUSED), ("fp8_e5m2", Status.DECLARED), ("fp8", Status.REFUSED)]
    found = [finding(status, feature="fp8_kv", kv_cache_dtype=name) for name, status in storage]
    text = lines(shown(Matrix((run(finding(Status.DECLARED), *found, backend="TRITON"),))))
    assert "fp8 KV   ○ declared, fp8_e5m2 only" in text
    assert "plain    ○ declared" in text


def test_each_device_has_a_section_with_what_was_asked_there() -> None:
    text = lines(shown(synthetic_matrix()))
    assert text[0] == "cpu (AMD EPYC 9654)"
    assert "TORCH    attnplug 0.1.0  2026-11-21  519 verified, 72 refused" in text
    assert "sm90 (NVIDIA H200)" in text


def test_the_values_of_one_backend_stand_in_one_table() -> None:
    text = lines(
        shown(Matrix((run(finding(Status.DECLARED), finding(Status.REFUSED, "no", head_size=576)),)))
    )
    at = text.index("head sizes   ○ declared  128")
    assert text[at + 1] == "             – refused   576"  # noqa: RUF001
    assert text[at + 2] == "dtypes       ○ declared  bfloat16"


def test_backends_that_do_not_fit_go_on_below() -> None:
    text = lines(shown(synthetic_matrix(), width=60))
    assert max(map(len, text[: text.index("Refuted: claimed, and wrong when run")])) <= 60
    assert "                 TORCH                TRITON" in text
    assert "                 FLASH_ATTN_2" in text


def test_a_terminal_narrower_than_a_backend_still_shows_every_answer() -> None:
    text = shown(synthetic_matrix(), width=24)
    assert text.count("sinks") >= 4
    assert max(map(len, lines(text.split("Refuted")[0]))) <= 24


def test_evidence_is_one_line_where_it_is_piped() -> None:
    text = lines(shown(synthetic_matrix(), width=60))
    assert (
        "FLASHINFER alibi/decode/d128/bfloat16/auto/b16/NHD: output: 37 of 2048 elements are off by more than 0.01, "
        "the worst by 0.73 at [3, 1, 17]; these are the numbers of a layer without ALiBi"
    ) in text


def test_evidence_wraps_in_a_terminal() -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown(synthetic_matrix(), width=60, terminal=True))
    assert max(map(len, lines(text))) <= 60


def test_who_serves_nothing_on_a_device_has_no_column_but_a_reason() -> None:
    refused = run(finding(Status.REFUSED, "cpu is not cuda"), backend="FLASHINFER")
    text = lines(shown(Matrix((run(finding(Status.VERIFIED)), refused))))
    assert "serves nothing there: FLASHINFER: cpu is not cuda" in text
    assert "plain    ◐ sampled 1 cell" in text
    assert shown(Matrix((refused,))).count("plain") == 0


def test_a_value_that_one_backend_was_not_asked_for_says_so() -> None:
    other = run(finding(Status.VERIFIED, feature="novel"), backend="ACME")
    text = lines(shown(Matrix((run(finding(Status.VERIFIED)), other))))
    assert "plain    ◐ sampled 1 cell  not asked" in text
    assert "novel    not asked         ◐ sampled 1 cell" in text


def test_the_legend_explains_what_is_shown_and_no_more() -> None:
    text = shown(Matrix((run(finding(Status.VERIFIED)),)))
    assert [line.partition(":")[0] for line in lines(text)[-2:]] == ["✓ verified", "◐ sampled"]
    assert "refuted" not in text
    assert "*" not in text
    assert "*: not with everything else that is served" in shown(synthetic_matrix())


def test_an_empty_matrix_says_that_nothing_was_asked() -> None:
    assert shown(Matrix(())) == "No backend was asked.\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_marks_are_ascii_where_the_output_is(encoding: str) -> None:
    text = shown(synthetic_matrix(), encoding=encoding)
    assert "v verified" in text
    assert "x refuted" in text
    assert text.isascii()


@pytest.mark.parametrize("terminal", [True, False])
def test_no_text_of_a_plugin_reaches_the_terminal_as_a_command(terminal: bool) -> None:
    text = re.sub(r"\x1b\[[012]m", "", shown(hostile_matrix(), terminal=terminal))
    assert "\u202e" not in text
    assert "\x1b[31m" not in text
    assert r"\x1b[31m" in text.replace("\n", "")
