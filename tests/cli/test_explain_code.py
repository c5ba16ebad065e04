"""`attnplug explain-code`: each code has its meaning, remedies and an example."""

from __future__ import annotations

import pytest

from attnplug.cli.commands.explain import codes
from attnplug.core.reasons import REASON_CODES


def test_every_code_is_listed(run):
    listed = run("explain-code", "--json").json
    assert [each["code"].partition(".")[0] for each in listed["codes"]] == list(REASON_CODES)
    out = run("explain-code").out
    assert all(code in out for code in REASON_CODES)


@pytest.mark.parametrize("code", codes())
def test_a_code_is_explained(run, code):
    facts = run("explain-code", code, "--json").json
    assert facts["meaning"]
    assert facts["remedies"]
    out = " ".join(run("explain-code", code).out.split())
    for text in (facts["meaning"], facts["example"], *facts["remedies"]):
        assert " ".join(text.split()) in out


def test_the_code_of_a_feature_names_it(run):
    assert run("explain-code", "feature.soft_cap", "--json").json["example"] == "soft_cap not supported"


@pytest.mark.parametrize(("code", "near"), [("haed_size", "head_size"), ("feature.sink", "feature.sinks")])
def test_an_unknown_code_has_near_names(run, code, near):
    outcome = run("explain-code", code)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"did you mean {near}" in outcome.err


def test_codes_of_nothing_are_refused_with_a_remedy(run):
    outcome = run("explain-code", "zzzzzz")
    assert outcome.code == 2
    assert "attnplug explain-code lists all codes" in outcome.err
