"""Known failures, shards and patterns: which checks are meant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.core.errors import PolicyError
from attnplug.testing.conformance.check_filter import (
    Shard,
    checked_reasons,
    known_reasons,
    matching,
    nearest,
    read_known_failures,
)

IDS = ["correct/decode-h4", "correct/decode-h8", "correct/prefill-h4", "refused/mla"]


def test_an_id_counts_before_a_pattern_and_the_first_pattern_before_the_next():
    known = {"correct/*": "all", "*-h8": "eight", "correct/decode-h4": "this one"}
    assert known_reasons(known, IDS, source="k") == {
        "correct/decode-h4": "this one",
        "correct/decode-h8": "all",
        "correct/prefill-h4": "all",
    }


def test_an_id_that_matches_no_check_names_the_nearest():
    with pytest.raises(
        PolicyError, match=r"k='correct/decode-h5' matches no check; did you mean correct/dec"
    ):
        known_reasons({"correct/decode-h5": "why"}, IDS, source="k")


def test_an_id_like_none_says_what_ids_look_like():
    with pytest.raises(PolicyError, match="k='zzz' matches no check; ids look like correct/decode-h4"):
        known_reasons({"zzz": "why"}, IDS, source="k")
    assert nearest("zzz", []) is None


def test_an_id_of_the_other_level_may_be_named_and_that_level_is_asked_only_then():
    asked = []

    def elsewhere():
        asked.append(True)
        return ["full/only"]

    assert known_reasons({"refused/mla": "why"}, IDS, source="k", elsewhere=elsewhere) == {
        "refused/mla": "why"
    }
    assert not asked
    assert known_reasons({"full/*": "why"}, IDS, source="k", elsewhere=elsewhere) == {}
    with pytest.raises(PolicyError, match="did you mean full/only"):
        known_reasons({"full/onyl": "why"}, IDS, source="k", elsewhere=elsewhere)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["correct/*"], "must be a mapping of check id to reason"),
        ({"": "why"}, "must be the id of a check"),
        ({3: "why"}, "must be the id of a check"),
        ({"a/b": ""}, r"\['a/b'\]='' is no reason: it must be a text; say why it fails"),
        ({"a/b": "  "}, "is no reason"),
        ({"a/b": None}, "is no reason"),
    ],
)
def test_a_known_failure_needs_an_id_and_a_reason(given, said):
    with pytest.raises(PolicyError, match=said):
        checked_reasons(given, "known_failures")


def test_a_reason_over_several_lines_becomes_one():
    assert checked_reasons({"a/b": "slow\n  and wrong "}, "k") == {"a/b": "slow and wrong"}


def test_a_file_of_known_failures_is_a_table_of_id_and_reason(tmp_path):
    path = tmp_path / "known.toml"
    path.write_text('[known_failures]\n"correct/decode-*" = "acme#12"\n')
    assert read_known_failures(path) == {"correct/decode-*": "acme#12"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('known_failures = "x"', "must be a mapping of check id to reason"),
        ('"a/b" = "why"', "has a key 'a/b'; the only one known is the table"),
        ("", "has no table"),
        ("[known_failures]\na/b = 1", "is not TOML: .*line 2"),
        ('[known_failures]\n"a/b" = 1', r"known_failures\['a/b'\]=1 is no reason"),
        ('[known_failures."a/b"]\nreason = "why"', r"known_failures\['a/b'\]=.* is no reason"),
    ],
)
def test_a_malformed_file_is_an_error_that_names_file_and_key(tmp_path, text, said):
    path = tmp_path / "known.toml"
    path.write_text(text)
    with pytest.raises(PolicyError, match=said) as caught:
        read_known_failures(path)
    assert "known.toml" in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_an_error(tmp_path):
    with pytest.raises(PolicyError, match="cannot be read: No such file"):
        read_known_failures(tmp_path / "none.toml")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(PolicyError, match="it is not UTF-8 text"):
        read_known_failures(tmp_path / "binary")


@given(st.lists(st.text(), unique=True), st.integers(1, 12))
def test_shards_are_disjoint_and_together_all(ids, count):
    parts = [Shard(index, count).of(ids) for index in range(1, count + 1)]
    assert sorted(each for part in parts for each in part) == sorted(ids)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_shard_is_read_and_printed():
    assert str(Shard.parse(" 2/4 ")) == "2/4"


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "1/0", "a/b", "-1/2", "1/2/3", ""])
def test_a_bad_shard_says_the_form(text):
    with pytest.raises(PolicyError, match=r"must be I/N with I from 1 to N; such as 1/4"):
        Shard.parse(text)


def test_patterns_choose_checks_in_their_own_order():
    assert matching(IDS, ["refused/*", "correct/decode-h4", "*-h4"], "--only") == [IDS[0], IDS[2], IDS[3]]
    with pytest.raises(PolicyError, match="--only='refused/mha' matches no check; did you mean refused/mla"):
        matching(IDS, ["refused/mha"], "--only")
