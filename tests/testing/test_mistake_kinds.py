"""The thirteen kinds of mistakes: each check finds one of them, and a run says what it proved."""

from __future__ import annotations

import pytest
from mutants.running import checks_of

from attnplug.backends.torch_native import TorchBackend
from attnplug.testing.conformance import Check, Level, conformance_checks
from attnplug.testing.conformance.mistakes.mistake_kinds import MISTAKE_KINDS, ProvenKind, proven_kinds
from attnplug.testing.isolation.results import CheckOutcome, Result

PLAIN = "correct/mixed-h4x2-d64-float32-b16-NHD"
IDS = [PLAIN, f"{PLAIN}-window6.0", "mla/batch/alone-decode", "merge/2-parts", "refused/feature-sinks"]


def proven(*results: Result) -> dict[str, ProvenKind]:
    return {each.kind: each for each in proven_kinds(results, IDS)}


def without_kind(checks: list[Check]) -> list[str]:
    return [check.id for check in checks if not any(kind.has(check.id) for kind in MISTAKE_KINDS)]


def test_there_are_thirteen_kinds_and_each_check_finds_one() -> None:
    assert len({kind.name for kind in MISTAKE_KINDS}) == 13
    checks = conformance_checks(TorchBackend, device="cpu", only=["tensors/*", "state/*"])
    assert without_kind(checks) == []
    assert [kind.name for kind in MISTAKE_KINDS if not any(kind.has(check.id) for check in checks)] == []


@pytest.mark.slow
@pytest.mark.parametrize("level", [Level.SMOKE, pytest.param(Level.FULL, marks=pytest.mark.rare)])
def test_each_numeric_case_finds_a_kind(level: Level) -> None:
    assert without_kind(checks_of(TorchBackend, level)) == []


@pytest.mark.parametrize(
    ("check", "kinds"),
    [
        (PLAIN, ["requests and lengths"]),
        (f"{PLAIN}-window6.0", ["masks and limits"]),
        ("mla/cache/only-slots-written-mixed", ["cache writes"]),
        ("gpu/graph-decode", ["graphs and buffers"]),
        ("builder/build-full", ["builders and metadata"]),
        ("composite/route-1-prefill", ["builders and metadata"]),
        ("mla/composite/other-steps", ["builders and metadata"]),
        ("correct/mixed-h8x1-d64-float32-fp8-b16-HND", ["heads and head sizes", "cache reads and pages", "storage types and dtypes"]),
    ],
)  # fmt: skip
def test_a_check_has_the_kinds_of_what_it_varies(check: str, kinds: list[str]) -> None:
    assert [kind.name for kind in MISTAKE_KINDS if kind.has(check)] == kinds


def test_a_run_says_what_it_proved_and_what_it_did_not_try() -> None:
    found = proven(
        Result(PLAIN, CheckOutcome.PASSED),
        Result(f"{PLAIN}-window6.0", CheckOutcome.FAILED),
        Result("merge/2-parts", CheckOutcome.SKIPPED, cause="layer not served: TORCH serves no such layer"),
    )
    lengths = found["requests and lengths"]
    assert (lengths.verdict, lengths.passed, lengths.failed) == ("passed", 1, 0)
    assert lengths.untested == ("not in this run: 1 check",)
    assert (found["masks and limits"].verdict, found["masks and limits"].failed) == ("failed", 1)
    assert found["ranks and merging"].verdict == "untested"
    assert found["ranks and merging"].untested == ("layer not served: 1 check",)
    assert found["softmax, scale and sinks"].untested == ("not declared: sinks",)
    assert found["graphs and buffers"].untested == ("no GPU: capture and replay of CUDA graphs",)
