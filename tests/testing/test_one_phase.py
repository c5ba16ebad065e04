"""Backends of one phase are checked in that phase, and skipped checks say why."""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterator

import mutants.builders
import mutants.numbers  # noqa: F401 - each import lists its mutants
import pytest
from catching import failures, variant
from hypothesis import given
from hypothesis import strategies as st
from mutants.table import mutants_of

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import AttentionBackend, Device, Phase, Reason
from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.conformance import Check, CheckSkipped, ConformanceError
from attnplug.testing.conformance.cases.case_axes import LONG, SHAPES
from attnplug.testing.conformance.cases.cases import Case
from attnplug.testing.conformance.cases.designed_cases import designed_cases
from attnplug.testing.conformance.check import CheckUntested
from attnplug.testing.conformance.listing import GROUPS, list_group
from attnplug.testing.conformance.numbers import correctness
from attnplug.testing.conformance.target import Target, in_phase, of_phase

ALONE = {phase: variant(f"ONLY_{phase.name}", supported_phases=(phase,)) for phase in Phase}
PHASES = pytest.mark.parametrize("phase", Phase)
lengths = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6)


# The steps of a phase


@PHASES
@given(steps=lengths)
def test_a_step_of_a_phase_is_one_wherever_there_can_be_one(
    phase: Phase, steps: list[tuple[int, int]]
) -> None:
    new, tokens = [n for n, _ in steps], [n + context for n, context in steps]
    found, totals, others = of_phase(phase, new, tokens, list(range(len(new))))
    assert [tokens[place] for place in others] == totals
    assert all(0 <= n <= total for n, total in zip(found, totals, strict=True))
    possible = phase is Phase.DECODE or any(n > 0 and total > 1 for n, total in zip(new, tokens, strict=True))
    assert in_phase(phase, found) is possible


def test_longer_queries_come_first_and_shorter_ones_may_follow() -> None:
    assert of_phase(Phase.PREFILL, [1, 1, 5, 0], [4, 9, 6, 2]) == ([5, 1, 1, 0], [6, 4, 9, 2])
    assert of_phase(Phase.PREFILL, [1, 1], [9, 2]) == ([3, 2], [9, 2])
    assert of_phase(Phase.DECODE, [1, 5, 0], [4, 6, 2]) == ([1, 1, 0], [4, 6, 2])
    assert of_phase(None, [1, 5], [4, 6]) == ([1, 5], [4, 6])


def test_a_backend_of_both_phases_or_of_none_is_asked_about_both() -> None:
    assert Target(TorchBackend, Device("cpu")).phase is None
    assert Target(variant("NONE", supported_phases=()), Device("cpu")).phase is None
    assert Target(variant("TEXT", supported_phases=("decode",)), Device("cpu")).phase is Phase.DECODE


@PHASES
def test_lengths_that_a_check_needs_as_they_are_are_not_changed(phase: Phase) -> None:
    target = Target(ALONE[phase], Device("cpu"))
    new = [1, 4]
    with pytest.raises(
        CheckSkipped, match=f"ONLY_{phase.name} serves {phase} only: no step with queries of 1, 4"
    ):
        target.batch(target.spec(), new, [4, 6], exact=True)
    assert target.batch(target.spec(), new, [4, 6]).seq_lens == ([4, 6] if phase is Phase.DECODE else [6, 4])


# The checks that run


@functools.cache
def cases(phase: Phase) -> list[Case]:
    return designed_cases(Target(ALONE[phase], Device("cpu")))


@PHASES
def test_every_feature_is_asked_in_the_phase(phase: Phase) -> None:
    asked = cases(phase)
    features = functools.reduce(operator.or_, (case.spec.required_features() for case in asked))
    missing = [flag.name for flag in TorchBackend.features if flag not in features]
    assert missing == (["ENCODER"] if phase is Phase.DECODE else [])
    shapes = {case.shape for case in asked}
    assert shapes - set(LONG) < set(SHAPES)
    for case in asked:
        common = case.batch(Target(ALONE[phase], Device("cpu"))).common
        assert in_phase(phase, common.query_start_loc_cpu.diff().tolist())


@pytest.mark.slow
@PHASES
def test_what_is_skipped_is_said_and_little(phase: Phase) -> None:
    target, counts = Target(ALONE[phase], Device("cpu")), Counter[str]()
    for group in GROUPS:
        for check in [] if group is correctness.checks else list_group(group, target):
            if check.id.startswith(("declaration/light", "refused/any", "refused/reasons", "format/")):
                continue  # slow, and of no phase
            _, problem = guarded_call(check)
            if isinstance(problem, CheckUntested):
                continue  # of no phase
            assert problem is None or isinstance(problem, CheckSkipped), check.id
            assert problem is None or str(phase) in str(problem) or "made here" in str(problem)
            counts["passed" if problem is None else "skipped"] += 1
    assert counts["passed"] > 120
    assert counts["skipped"] < 32


@pytest.mark.slow
@PHASES
def test_torch_passes_in_each_phase_alone(phase: Phase) -> None:
    assert failures(ALONE[phase], correctness.checks) == {}


# Wrong backends

IGNORED = ("windows", "chunks", "soft-caps", "sinks", "alibi", "scales", "fp8-scales")


def as_one_phase(backend: type[AttentionBackend], phase: Phase) -> type[AttentionBackend]:
    return type(backend.__name__, (backend,), {"supported_phases": (phase,)})


@PHASES
@pytest.mark.parametrize("what", IGNORED)
def test_what_is_ignored_in_the_one_phase_is_caught_and_named(phase: Phase, what: str) -> None:
    wrong = next(each for each in mutants_of("numbers") if each.name == f"ignores_{what.replace('-', '_')}")
    alone = [case for case in cases(phase) if case.id.partition("-")[2] == wrong.check.partition("-")[2]]
    assert alone

    def asked(target: Target) -> Iterator[Check]:
        for case in alone:
            yield Check(case.id, functools.partial(correctness.check_case, target, case), "")

    found = failures(as_one_phase(wrong.backend, phase), asked)
    assert found
    for problem in found.values():
        assert isinstance(problem, ConformanceError)
        assert problem.named == wrong.says


def those(start: str) -> Callable[[Target], Iterator[Check]]:
    def checks(target: Target) -> Iterator[Check]:
        every = (check for group in GROUPS if group is not correctness.checks for check in group(target))
        return (check for check in every if check.id.startswith(start))

    return checks


@PHASES
@pytest.mark.parametrize(
    "name", ["KEEPS_TABLE", "SHORT_DRAFTS", "STALE_TABLE", "CHANGES_COMMON", "SHUFFLES_SLOTS"]
)
def test_builders_that_are_wrong_in_the_one_phase_are_caught(phase: Phase, name: str) -> None:
    wrong = next(each for each in mutants_of("builders") if each.name == name.lower())
    found = failures(as_one_phase(wrong.backend, phase), those(wrong.check))
    assert any(wrong.says in str(problem) for problem in found.values()), found


def serves_all(cls, spec, device, phase=None) -> list[Reason]:
    return [
        reason
        for reason in TorchBackend.validate_configuration.__func__(cls, spec, device, phase)
        if reason.code != "phase"
    ]


@PHASES
def test_a_phase_that_is_not_declared_must_be_refused(phase: Phase) -> None:
    eager = variant("EAGER", supported_phases=(phase,), validate_configuration=serves_all)
    (problem,) = failures(eager, those("refused/phase")).values()
    other = next(each for each in Phase if each != phase)
    assert f"the phase {other} is accepted, though it is not declared" in str(problem)


def refuses_the_other_only(cls, spec, device, phase=None) -> list[Reason]:
    found = TorchBackend.validate_configuration.__func__(cls, spec, device, phase)
    return [] if phase is None else found


@PHASES
def test_both_phases_at_once_must_be_refused_too(phase: Phase) -> None:
    eager = variant("EAGER", supported_phases=(phase,), validate_configuration=refuses_the_other_only)
    problems = [str(problem) for problem in failures(eager, those("refused/phase")).values()]
    assert len(problems) == 1
    assert "among them, are not refused with the code phase" in problems[0]
