"""Checks that did not run are explained by kind, and declarations that nobody could try end the report."""

from __future__ import annotations

import pytest

from attnplug.testing.conformance.check import CheckSkipped, CheckUntested, SkipKind
from attnplug.testing.isolation.controller import Controller
from attnplug.testing.isolation.results import CheckOutcome, Result
from attnplug.testing.plugin import pytest_report_teststatus
from attnplug.testing.skips import skip_counts, untested_words

SKIPS = (
    CheckSkipped("ACME serves no layer with {}", SkipKind.LAYER),
    CheckSkipped("ACME serves no layer with {'window': (6, 0)}", SkipKind.LAYER),
    CheckSkipped("made here"),
)
UNTESTED = CheckUntested("CUDA graphs (ALWAYS): they need a GPU")


def report(text: str, outcome: str = "skipped") -> pytest.TestReport:
    node = "attnplug/testing/suite.py::test_conformance[declared/graphs]"
    longrepr = ("suite.py", 1, f"Skipped: {text}") if outcome == "skipped" else None
    return pytest.TestReport(node, ("suite.py", 1, ""), {}, outcome, longrepr, "call")  # type: ignore[arg-type]


def test_skips_are_counted_by_kind() -> None:
    texts = [each.text for each in SKIPS]
    assert skip_counts(texts) == "2 layer not served, 1 does not apply"
    assert SkipKind.read(texts[0]) == (SkipKind.LAYER, "ACME serves no layer with {}")
    assert SkipKind.read(texts[2]) == (SkipKind.OTHER, "made here")


def test_the_last_line_names_each_untested_declaration_once() -> None:
    causes = [str(UNTESTED), "device types cuda: this run is on cpu", str(UNTESTED)]
    assert untested_words(causes) == "; DECLARED, BUT UNTESTED HERE: CUDA graphs (ALWAYS), device types cuda"
    assert untested_words([]) == ""


def test_pytest_counts_what_is_untested_apart_from_skips() -> None:
    assert pytest_report_teststatus(report(UNTESTED.text))[0] == "untested"
    assert pytest_report_teststatus(report(SKIPS[0].text)) is None
    assert pytest_report_teststatus(report("", "passed")) is None


def test_a_run_in_workers_tells_untested_from_skipped() -> None:
    ended: list[Result] = []

    class Observer:
        def started(self, check_id: str) -> None: ...

        def finished(self, result: Result) -> None:
            ended.append(result)

    controller = Controller({"known": {}, "log": "", "timeout": 1.0}, [], Observer())
    for each in (SKIPS[0], UNTESTED):
        controller.pytest_runtest_logreport(report(each.text))
    assert [(each.outcome, each.cause) for each in ended] == [
        (CheckOutcome.SKIPPED, SKIPS[0].text),
        (CheckOutcome.UNTESTED, str(UNTESTED)),
    ]
