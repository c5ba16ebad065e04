"""`@parametrize_with_checks`: the kit inside a backend's own tests."""

from __future__ import annotations

import pytest
import torch
from few_checks import ACME, few_checks

from attnplug.core.errors import BackendUnavailableError, PolicyError, SpecError
from attnplug.testing import conformance_checks, parametrize_with_checks
from attnplug.testing.conformance import listing
from attnplug.testing.conformance.check import Check
from attnplug.testing.decorator import as_parameters

pytest_plugins = ["pytester"]

TESTS = """
from few_checks import ACME
from attnplug.testing import parametrize_with_checks

@parametrize_with_checks(ACME, device="cpu", known_failures={known!r})
def test_conformance(check):
    check()
"""


@pytest.fixture(autouse=True)
def _few_checks(monkeypatch):
    monkeypatch.setattr(listing, "GROUPS", {few_checks: False})


def test_each_check_is_a_test_under_its_id(pytester):
    pytester.makepyfile(TESTS.format(known={}))
    result = pytester.runpytest_inprocess("-v", "-rs")
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "*::test_conformance[[]good/passes] PASSED*",
            "*::test_conformance[[]bad/fails] FAILED*",
            "*ConformanceError: the numbers are wrong",
            "SKIPPED*nothing to try here",
        ]
    )


def test_a_known_failure_is_expected_with_its_reason(pytester):
    pytester.makepyfile(TESTS.format(known={"bad/*": "acme#12", "good/full-only": "of the other level"}))
    result = pytester.runpytest_inprocess("-rx")
    result.assert_outcomes(passed=1, xfailed=1, skipped=1)
    result.stdout.fnmatch_lines("XFAIL*bad/fails*acme#12")


def test_a_known_failure_that_passes_fails(pytester):
    pytester.makepyfile(TESTS.format(known={"good/passes": "acme#13"}))
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=2, skipped=1)
    result.stdout.fnmatch_lines("*XPASS(strict)*acme#13*")


def test_an_unknown_id_is_an_error_where_the_test_is_defined():
    with pytest.raises(
        PolicyError, match="known_failures='good/pases' matches no check; did you mean good/p"
    ):
        parametrize_with_checks(ACME, known_failures={"good/pases": "why"}, device="cpu")


def test_a_reason_must_be_given():
    with pytest.raises(PolicyError, match="is no reason"):
        parametrize_with_checks(ACME, known_failures={"bad/fails": ""}, device="cpu")


def test_a_backend_is_a_class():
    with pytest.raises(
        SpecError, match="backend='ACME' must be a subclass of AttentionBackend, not its name"
    ):
        parametrize_with_checks("ACME")


def test_a_level_is_smoke_or_full():
    with pytest.raises(SpecError, match="level='half' must be one of smoke, full"):
        parametrize_with_checks(ACME, level="half", device="cpu")
    checks = parametrize_with_checks(ACME, level="full", device="cpu").args[1]
    assert [each.id for each in checks][-1] == "good/full-only"


def test_the_list_is_the_one_of_conformance_checks():
    checks = parametrize_with_checks(ACME, device="cpu").args[1]
    assert [each.id for each in checks] == [check.id for check in conformance_checks(ACME, device="cpu")]


class Elsewhere(ACME):
    device_types = ("hpu",)


def test_a_device_that_is_not_served_is_an_error_where_it_was_asked_for():
    with pytest.raises(BackendUnavailableError, match="ACME does not run here on cpu: device type not supp"):
        parametrize_with_checks(Elsewhere, device="cpu")


def test_without_a_device_asked_for_the_test_is_skipped_with_the_reasons():
    (only,) = parametrize_with_checks(Elsewhere).args[1]
    (skip,) = only.marks
    assert skip.name == "skip"
    assert "ACME does not run here on" in skip.kwargs["reason"]


def test_a_check_has_one_thread_of_torch_and_the_test_its_own_again():
    seen = []
    (parameter,) = as_parameters([Check("one/thread", lambda: seen.append(torch.get_num_threads()), "")], {})
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        parameter.values[0]()
        assert (seen, torch.get_num_threads()) == ([1], 3)
    finally:
        torch.set_num_threads(before)
