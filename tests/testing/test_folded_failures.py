"""Failures of one mistake are one entry: the cheapest check that names it, and the others in a line."""

from __future__ import annotations

from attnplug.core import LayerSpec
from attnplug.testing.batches import StepArguments
from attnplug.testing.conformance.check import ConformanceError, error_context, reworded
from attnplug.testing.isolation.failures import Failure, folded
from attnplug.testing.isolation.results import CheckOutcome, Result

IDS = ["declared/window", "correct/plain", "correct/packed", "correct/long", "state/steps"]


def failed(check: str, says: str, *, named: bool = True, tokens: int = 100) -> Result:
    return Result(check, CheckOutcome.FAILED, failure=Failure(says, named, tokens))


def ids_of(*results: Result) -> list[list[str]]:
    return [[each.id for each in group] for group in folded(results, IDS)]


def test_failures_that_say_the_same_are_one_group() -> None:
    window, cap = "sliding window ignored", "soft cap ignored"
    results = failed("correct/plain", window), failed("correct/packed", cap), failed("correct/long", window)
    assert ids_of(*results) == [["correct/plain", "correct/long"], ["correct/packed"]]


def test_the_cheapest_check_comes_first_and_the_list_decides_between_steps_of_one_size() -> None:
    results = (
        failed("correct/long", "cap", tokens=5003),
        failed("correct/packed", "cap", tokens=611),
        failed("correct/plain", "cap", tokens=644),
    )
    assert ids_of(*results) == [["correct/plain", "correct/packed", "correct/long"]]


def test_mistakes_with_a_name_come_before_patterns() -> None:
    results = failed("declared/window", "only decodes", named=False, tokens=1), failed("correct/long", "cap")
    assert ids_of(*results) == [["correct/long"], ["declared/window"]]


def test_failures_that_say_nothing_stay_apart() -> None:
    assert ids_of(failed("correct/plain", ""), failed("state/steps", "")) == [
        ["correct/plain"],
        ["state/steps"],
    ]


def test_a_failure_is_the_same_after_its_report() -> None:
    step = StepArguments(None, LayerSpec(num_heads=1, num_kv_heads=1, head_size=8), (1, 2), (3, 4), {})  # type: ignore[arg-type]
    failure = Failure.of(ConformanceError("output[0]: wrong", "soft cap ignored", step))
    assert failure == Failure("soft cap ignored", is_named=True, tokens=7)
    assert Failure.read([*failure.properties(), ("of another plugin", 1)]) == failure
    assert Failure.read([]) == Failure()


def test_another_text_of_an_error_is_of_the_same_mistake() -> None:
    problem = ConformanceError("output[0]: wrong", says="pattern: only requests with decode")
    again = reworded(problem, "declares windows, and output[0]: wrong")
    assert str(again) == "declares windows, and output[0]: wrong"
    assert Failure.of(again) == Failure.of(problem)
    assert reworded(KeyError("x"), "declares windows, and raised").says == "declares windows, and raised"


def test_errors_of_one_line_of_a_backend_say_the_same() -> None:
    said = []
    for what in ("build of a decode", "build of a prefill"):
        try:
            with error_context(what):
                int("not a number")
        except ConformanceError as problem:
            said.append(Failure.of(problem).says)
    assert said[0] == said[1]
    assert said[0].startswith("ValueError ")
    assert Failure.of(KeyError("x")).says == "KeyError: 'x'"
