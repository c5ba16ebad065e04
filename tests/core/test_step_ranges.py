"""Ranges of steps: their limits, their text and their words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.core.composite.steps import (
    StepChoice,
    StepKind,
    StepRange,
    StepSizes,
    join_routes,
    split_routes,
)
from attnplug.core.errors import SpecError

limits = st.tuples(st.integers(1, 900), st.none() | st.integers(0, 900)).map(
    lambda pair: (pair[0], None if pair[1] is None else pair[0] + pair[1])
)


@st.composite
def ranges(draw):
    kind = draw(st.sampled_from(StepKind))
    keys = draw(limits) if kind is StepKind.MIXED else (1, None)
    return StepRange(kind, draw(limits), draw(limits), draw(limits), keys)


@given(ranges())
def test_a_range_is_read_from_its_text(steps):
    assert StepRange.parse(str(steps)) == steps


@given(st.lists(st.tuples(ranges(), st.sampled_from(["A", "B", "C-1"])), min_size=1, max_size=4))
def test_routes_are_read_from_a_name_that_rules_can_have(routes):
    name = join_routes("A+B", tuple(routes))
    assert split_routes(name) == ("A+B", tuple(routes))
    # A rule has commas between its parts, and an equals sign after its pattern.
    assert not set(",=") & set(name)


def test_a_name_without_brackets_has_no_routes():
    assert split_routes("A+B") == ("A+B", ())
    assert join_routes("A+B", ()) == "A+B"


@given(ranges(), st.data())
def test_a_range_has_the_steps_within_its_limits_and_no_others(steps, data):
    def within(span):
        return data.draw(st.integers(span[0], 2000 if span[1] is None else span[1]))

    names = ("query", "requests", "rows", "keys")
    inside = {name: within(getattr(steps, name)) for name in names}
    assert steps.has(StepSizes(steps.kind, **inside))
    for name in names:
        least, most = getattr(steps, name)
        assert not steps.has(StepSizes(steps.kind, **{**inside, name: least - 1}))
        if most is not None:
            assert not steps.has(StepSizes(steps.kind, **{**inside, name: most + 1}))
    other = next(kind for kind in StepKind if kind is not steps.kind)
    assert not steps.has(StepSizes(other, **inside))


@given(ranges(), ranges(), st.tuples(*[st.integers(1, 900)] * 4))
def test_a_range_covers_those_whose_steps_it_has(one, other, numbers):
    assert one.covers(one)
    if one.covers(other):
        sizes = StepSizes(other.kind, *numbers)
        assert one.has(sizes) or not other.has(sizes)
    wider = StepRange(one.kind)
    assert wider.covers(one)
    assert one == wider or not one.covers(wider)


@pytest.mark.parametrize(
    ("steps", "text", "words"),
    [
        (StepRange(StepKind.DRAFT), "draft", "decodes of several tokens"),
        (
            StepRange(StepKind.PREFILL, query=(1, 256)),
            "prefill query ..256",
            "prefills with at most 256 new tokens a request",
        ),
        (
            StepRange(StepKind.MIXED, requests=(17, 34), keys=(1, 4096)),
            "mixed requests 17..34 keys ..4096",
            "mixed steps with 17 to 34 requests and at most 4096 tokens a request",
        ),
        (
            StepRange(StepKind.PREFILL, query=(2, 9), requests=(1, 3), rows=(4, None)),
            "prefill query 2..9 requests ..3 rows 4..",
            "prefills with 2 to 9 new tokens in the longest request, at most 3 requests and at least 4 new tokens",
        ),
        (StepRange(StepKind.DECODE, rows=(5, None)), "decode rows 5..", "decodes with at least 5 new tokens"),
        (StepRange(StepKind.DECODE, requests=(1, 1)), "decode requests ..1", "decodes with 1 request"),
        (
            StepRange(StepKind.MIXED, query=(1, 1), requests=(2, 2), keys=(7, 7)),
            "mixed query ..1 requests 2..2 keys 7..7",
            "mixed steps with 1 new token a request, 2 requests and 7 tokens in the longest request",
        ),
    ],
)
def test_a_range_is_said_in_text_and_in_words(steps, text, words):
    assert (str(steps), steps.words) == (text, words)
    assert str(StepChoice(steps, "A", "by priority")) == f"{words} run on A: by priority"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must begin with one of decode, draft"),
        ("warm-up", "must begin with one of decode, draft"),
        ("prefill query", "is no range of steps"),
        ("prefill query 1..2x", "is no range of steps"),
        ("prefill query ..2 query ..3", "is no range of steps"),
        ("prefill query 9..3", "must be the least and the most"),
        ("decode keys ..9", "is for mixed steps: a graph replays decodes"),
    ],
)
def test_text_of_another_form_is_refused_with_the_form(text, why):
    with pytest.raises(SpecError, match=why):
        StepRange.parse(text)


@pytest.mark.parametrize("value", [(0, 1), (2, 1), (1,), 7, (1.0, None), (True, None)])
def test_limits_that_are_no_span_are_refused(value):
    with pytest.raises(SpecError, match="query"):
        StepRange(StepKind.PREFILL, query=value)


@pytest.mark.parametrize("name", ["A+B[draft on A", "A+B[draft]", "A+B[ on A]", "A+B[draft on ]"])
def test_brackets_of_another_form_are_refused(name):
    with pytest.raises(SpecError):
        split_routes(name)


def test_a_kind_of_another_name_is_refused():
    with pytest.raises(SpecError, match="kind='prompt'"):
        StepRange("prompt")
