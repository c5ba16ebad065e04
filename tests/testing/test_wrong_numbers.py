"""Each backend with wrong numbers fails where it is wrong and nowhere else, and its mistake is named."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterator
from typing import Any

import mutants.numbers  # noqa: F401 - lists its mutants
import pytest
import torch
from catching import failures, torch_cases, variant
from mutants.table import Mutant, mutants_of
from plain_attention import KernelImpl, PlainImpl

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import Device, Feature
from attnplug.core.errors import BatchError
from attnplug.testing.conformance import Check, ConformanceError
from attnplug.testing.conformance.cases.designed_cases import designed_cases
from attnplug.testing.conformance.mistakes.mistake_recognition import mistaken_answers
from attnplug.testing.conformance.numbers import correctness
from attnplug.testing.conformance.target import Target

WRONG_NUMBERS = mutants_of("numbers")
PLAIN = "correct/mixed-h4x2-d64-float32-b16-NHD"


@pytest.mark.parametrize("wrong", WRONG_NUMBERS, ids=lambda wrong: wrong.name)
def test_wrong_numbers_are_caught_and_named(wrong: Mutant) -> None:
    def asked(target: Target) -> Iterator[Check]:
        names = [f"correct/{case.id}" for case in torch_cases()]
        can_fail = fnmatch.filter(names, wrong.asked)
        chosen = {PLAIN, wrong.check, *can_fail[:: max(len(can_fail) // 6, 1)]}
        for name, case in zip(names, torch_cases(), strict=True):
            if name in chosen:
                yield Check(name, functools.partial(correctness.check_case, target, case), "")

    found = failures(wrong.backend, asked)
    problem = found[wrong.check]
    assert isinstance(problem, ConformanceError)
    assert problem.named == (wrong.says or None)
    assert wrong.says in str(problem)
    if wrong.check.startswith(f"{PLAIN}-"):
        assert PLAIN not in found  # it asks nothing of what is got wrong
    for name, other in found.items():
        if name == PLAIN and not fnmatch.fnmatch(name, wrong.asked):
            continue  # numbers that no name is known for here
        if "topk" in name and isinstance(other.__cause__, BatchError) and "selection" in str(other):
            continue  # without its spans the layer takes the indexer's choice for a mistake, and refuses it
        assert isinstance(other, ConformanceError), f"{name}: {other!r}"
        # Some tolerances are so wide that a small difference is caught, but not told apart.
        wide = "fp8" in name or ("cap3" in name and "float32" not in name)
        # A rounded query moves large logits by as much as some mistakes do.
        large = name.endswith(("-far", "-sharp")) and "float16" in name
        told = other.named == problem.named or large or (wide and other.named is None)
        # Rows without keys, and rows that nobody wrote, are reported before any name is looked for.
        told = told or any(words in str(other) for words in ("not -inf", "have -inf", "error nan"))
        # A stranger's keys of NaN hide which mistake reads them.
        told = told or (name.endswith("-strangers") and "NaN or infinite" in str(other))
        assert told or same_numbers(name, wrong.says, other.named), name


def same_numbers(name: str, made: str, told: str | None) -> bool:
    """Whether the mistake that is told gives the numbers of the one that was made, in all rows that are wrong.

    A choice of a few keys may hold none of those that only one of the mistakes sees.
    """
    case = next(case for case in torch_cases() if f"correct/{case.id}" == name)
    batch = case.batch(Target(TorchBackend, Device("cpu")))
    answers = {found: numbers for found, *numbers in mistaken_answers(batch, {made, told or ""})}
    if made not in answers or told not in answers:
        return False
    right = batch.oracle()
    same = functools.partial(torch.isclose, equal_nan=True)  # requests of strangers are NaN
    is_right = same(answers[made][0], right.output).all(-1)
    if batch.spec.needs_lse:
        is_right &= same(answers[made][1], right.lse)
    return all(
        bool(same(mine[~is_right], theirs[~is_right]).all())
        for mine, theirs in zip(answers[made], answers[told], strict=True)
        if mine is not None
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cap_that_is_ignored_is_caught_within_the_wider_bounds_of_half_precision(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is asked here is whether it is caught: the search for its name takes most of the time of a failure.
    monkeypatch.setattr(correctness, "wrong_answer", lambda problem, *_: ConformanceError(problem))
    ignoring = next(each.backend for each in WRONG_NUMBERS if each.name == "ignores_soft_caps")
    half = variant("HALF", impl=ignoring.get_impl_cls(), supported_dtypes=(dtype,))
    cases = designed_cases(Target(half, Device("cpu")))
    # Caps far above a layer's logits change them by less than half precision does: caps of 30 and more, and small scales.
    capped = [
        case
        for case in cases
        if (case.spec.logits_soft_cap or 30.0) < 30.0 and case.spec.scale * case.spec.head_size**0.5 > 0.7
    ]
    plain = capped[0].spec.replace(logits_soft_cap=None, block_size=16)
    assert plain.required_features() == Feature(0)

    def asked(target: Target) -> Iterator[Check]:
        for case in capped:
            yield Check(case.id, functools.partial(correctness.check_case, target, case), "")

    found = failures(half, asked)
    # With one visible key, or equal keys, a cap changes nothing.
    assert len(found) >= len(capped) - 1
    assert capped[0].id in found


@pytest.mark.slow  # `.ci/run` runs the whole kit with TORCH, as the recipe of its environment says
@pytest.mark.rare
def test_torch_passes() -> None:
    assert failures(TorchBackend, correctness.checks) == {}


@pytest.mark.slow
@pytest.mark.parametrize("impl", [PlainImpl, KernelImpl])
def test_the_steps_that_wrong_backends_change_are_right_as_they_stand(impl: type[PlainImpl]) -> None:
    def some(target: Target) -> Iterator[Check]:
        yield from list(correctness.checks(target))[::3]

    assert failures(variant("PLAIN", impl=impl), some) == {}


def test_wrong_backends_have_names_of_their_own() -> None:
    names = [wrong.name for wrong in WRONG_NUMBERS]
    assert len(set(names)) == len(names) >= 20


class WritesPadding(TorchImpl):
    """Writes every row of the output, as a kernel launched over the padded batch does."""

    def attend(self, *args: Any, **options: Any) -> torch.Tensor:
        return super().attend(*args, **options).nan_to_num_(0.0)


class WritesPaddedLses(PlainImpl):
    """Writes every row of the LSE."""

    def write_lse(self, lse: torch.Tensor, output_lse: torch.Tensor) -> None:
        super().write_lse(lse, output_lse)
        output_lse.nan_to_num_(0.0)


@pytest.mark.parametrize(
    ("impl", "says"), [(WritesPadding, "output rows past"), (WritesPaddedLses, "LSE rows past")]
)
def test_rows_past_the_tokens_must_stay_untouched(impl: type[TorchImpl], says: str) -> None:
    def first(target: Target) -> Iterator[Check]:
        case = next(case for case in torch_cases() if case.spec.needs_lse)
        yield Check("correct/first", functools.partial(correctness.check_case, target, case), "")

    (problem,) = failures(variant("PADDING", impl=impl), first).values()
    assert says in str(problem)
    assert isinstance(problem, ConformanceError)
    assert problem.named is None
