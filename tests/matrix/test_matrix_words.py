"""Values, lists and texts as people read them."""

from __future__ import annotations

import pytest
from synthetic_matrix import run

from attnplug.core.features import Feature
from attnplug.matrix import Status
from attnplug.matrix.words import (
    MARKS,
    MEANINGS,
    PLAIN_MARKS,
    Value,
    device_in_words,
    in_order,
    list_in_words,
    one_line,
    value_in_words,
)


@pytest.mark.parametrize("marks", [MARKS, PLAIN_MARKS])
def test_every_status_has_a_mark_of_its_own(marks: dict[Status, str]) -> None:
    assert len({marks[status] for status in Status}) == len(Status) == len(MEANINGS)


def test_the_plain_marks_are_ascii() -> None:
    assert "".join(PLAIN_MARKS.values()).isascii()


def test_no_two_features_read_alike() -> None:
    words = [value_in_words("feature", name) for name in Feature(-1).names()]
    assert len(set(words)) == len(words)
    assert "_" not in "".join(words)


@pytest.mark.parametrize(
    ("axis", "value", "words"),
    [
        ("feature", "sliding_window", "sliding window"),
        ("feature", "alibi", "ALiBi"),
        ("kv_cache_dtype", "fp8_e4m3", "fp8_e4m3"),
        ("head_size", 128, "128"),
        ("block_size", None, "no pages"),
    ],
)
def test_a_value_reads_as_people_say_it(axis: str, value: Value, words: str) -> None:
    assert value_in_words(axis, value) == words


def test_known_values_come_first_and_no_pages_last() -> None:
    assert in_order("layout", [None, "XYZ", "HND", "NHD", "HND"]) == ["NHD", "HND", "XYZ", None]
    assert in_order("block_size", [None, 256, 16, 32]) == [16, 32, 256, None]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], ""),
        ([64], "64"),
        ([16, 24, 32, 40, 48], "16, 24, 32, 40, 48"),
        ([16, 24, 32, 40, 48, 56], "16 to 56 in steps of 8"),
        ([8, 16, 32, 48, 64, 80, 96, 112, 576], "8, 16 to 112 in steps of 16, 576"),
        (["a", "b", "c", "d", "e", "f"], "a, b, c, d, e, f"),
        ([16, 24, 32, 40, 48, 56, None], "16 to 56 in steps of 8, no pages"),
    ],
)
def test_many_numbers_in_equal_steps_are_said_by_their_ends(values: list[Value], words: str) -> None:
    assert list_in_words("head_size", [(value, "") for value in values]) == words


def test_numbers_with_different_marks_are_not_said_together() -> None:
    marked = [(size, "*" if size > 32 else "") for size in range(8, 88, 8)]
    assert list_in_words("head_size", marked) == "8, 16, 24, 32, 40* to 80* in steps of 8"


def test_a_device_goes_by_what_it_calls_itself_too() -> None:
    assert device_in_words([run(device="sm90")]) == "sm90"
    named = [run(device="sm90", device_name="NVIDIA H200"), run(device="sm90", device_name="NVIDIA H200")]
    assert device_in_words(named) == "sm90 (NVIDIA H200)"


def test_one_line_breaks_nothing_and_moves_no_cursor() -> None:
    assert one_line("two\nlines\tand \x1b[31m red \u202e") == r"two lines and \x1b[31m red \u202e"
