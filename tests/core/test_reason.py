"""Reasons: sentences for people, attributes for programs."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.core import MultipleOf, Reason
from attnplug.core.reasons import REASON_CODES

texts = st.none() | st.text(min_size=1)
reasons = st.builds(
    Reason,
    st.text(),
    code=st.sampled_from(REASON_CODES),
    field=texts,
    requested=texts,
    supported=texts,
    remedy=texts,
)


def facts(reason: Reason) -> tuple[str | None, ...]:
    return (str(reason), reason.code, reason.field, reason.requested, reason.supported, reason.remedy)


def test_a_reason_reads_fact_then_value_and_limit_then_remedy() -> None:
    reason = Reason(
        "head_size not supported",
        code="head_size",
        field="head_size",
        requested=80,
        supported=(64, 128, 256),
        remedy="pip install 'flash-attn>=2.7'",
    )
    assert reason == "head_size not supported: 80 is not one of 64, 128, 256; pip install 'flash-attn>=2.7'"
    assert (reason.requested, reason.supported) == ("80", "64, 128, 256")


@pytest.mark.parametrize(
    ("requested", "supported", "sentence"),
    [
        (None, None, "size not supported"),
        (80, None, "size not supported: 80"),
        (None, "not known", "size not supported: not known"),
        (80, (64,), "size not supported: 80 is not 64"),
        ("fp8", ["auto", "fp16"], "size not supported: fp8 is not one of auto, fp16"),
        (["a", "b"], ("c",), "size not supported: a, b is not c"),
        (24, (MultipleOf(16),), "size not supported: 24 is not a multiple of 16"),
        (24, (MultipleOf(16), 8), "size not supported: 24 is not one of multiples of 16, 8"),
        (264, range(16, 257, 8), "size not supported: 264 is not one of 16 to 256 in steps of 8"),
        (
            264,
            (8, *range(16, 257, 16), *range(288, 513, 32), 576),
            "size not supported: 264 is not one of 8, 16 to 256 in steps of 16, 288 to 512 in steps of 32, 576",
        ),
        (3, [8, 7, 6, 5, 4, 2, 1, 0], "size not supported: 3 is not one of 8, 7, 6, 5, 4, 2, 1, 0"),
        (9, [1, 2, 3, 4, 5, 6, 7, 12], "size not supported: 9 is not one of 1, 2, 3, 4, 5, 6, 7, 12"),
        (9, [1, 2, 3, 4, 5, 6, 7], "size not supported: 9 is not one of 1, 2, 3, 4, 5, 6, 7"),
        (0, (), "size not supported: 0"),
        ((), (), "size not supported"),
    ],
)
def test_the_sentence_says_what_there_is_to_say(requested: object, supported: object, sentence: str) -> None:
    assert (
        Reason("size not supported", code="head_size", requested=requested, supported=supported) == sentence
    )


def test_a_limit_of_nothing_is_no_limit() -> None:
    reason = Reason("phase not supported", code="phase", requested="decode", supported=())
    assert (reason.requested, reason.supported) == ("decode", None)


def test_a_list_of_reasons_is_a_list_of_sentences() -> None:
    listed = [Reason("MLA not supported", code="mla"), Reason("sinks not supported", code="sink")]
    assert listed == ["MLA not supported", "sinks not supported"]
    assert ", ".join(listed) == "MLA not supported, sinks not supported"
    assert "MLA" in listed[0]
    assert type(str(listed[0])) is str


def test_a_reason_must_have_a_code() -> None:
    with pytest.raises(TypeError, match="code"):
        Reason("head_size not supported")  # type: ignore[call-arg]


@given(reasons)
def test_copies_and_pickles_keep_every_fact(reason: Reason) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        read = pickle.loads(pickle.dumps(reason, protocol))
        assert (type(read), facts(read)) == (Reason, facts(reason))
    assert facts(copy.copy(reason)) == facts(copy.deepcopy(reason)) == facts(reason)


@given(reasons)
def test_json_keeps_every_fact(reason: Reason) -> None:
    assert facts(Reason.from_dict(json.loads(json.dumps(reason.to_dict())))) == facts(reason)


def test_a_reason_is_json_by_itself_too() -> None:
    assert json.dumps([Reason("MLA not supported", code="mla")]) == '["MLA not supported"]'


def test_a_dict_may_leave_out_what_is_not_known() -> None:
    read = Reason.from_dict({"text": "MLA not supported", "code": "mla"})
    assert facts(read) == ("MLA not supported", "mla", None, None, None, None)


def test_codes_are_unique() -> None:
    assert len(set(REASON_CODES)) == len(REASON_CODES)
