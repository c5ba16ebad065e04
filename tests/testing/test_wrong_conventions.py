"""Each known convention is named where a backend follows it, and by the checks of several ranks."""

from __future__ import annotations

import pytest
from catching import failures, variant
from mutants.conventions import CONVENTIONS, Convention
from mutants.table import Mutant, mutants_of
from plain_attention import PlainImpl

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import Device, LayerSpec
from attnplug.testing import paged_batch
from attnplug.testing.conformance.check import ConformanceError, Level
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.mistakes.expectations import expect_correct
from attnplug.testing.conformance.serving import context_parallel
from attnplug.testing.conformance.target import Target

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32")
LENGTHS = [1, 5, 12, 23], [29, 22, 12, 40]
"""A decode, two extends and a prefill."""


@pytest.mark.parametrize("wrong", CONVENTIONS, ids=lambda wrong: wrong.mutant.name)
def test_a_convention_is_named(wrong: Convention) -> None:
    batch = paged_batch(SPEC.replace(**wrong.fields), *LENGTHS, **wrong.options)
    target = Target(wrong.mutant.backend, Device("cpu"))
    found = Harness.of(target, batch).forward(batch)
    with pytest.raises(ConformanceError) as caught:
        expect_correct(batch, found, "in a step")
    assert caught.value.named == wrong.mutant.says
    assert len(str(caught.value).splitlines()) <= 11


@pytest.mark.parametrize("fields", [wrong.fields for wrong in CONVENTIONS], ids=str)
def test_the_right_convention_is_right(fields: dict[str, object]) -> None:
    batch = paged_batch(SPEC.replace(**fields), *LENGTHS)
    target = Target(variant("PLAIN", impl=PlainImpl), Device("cpu"))
    expect_correct(batch, Harness.of(target, batch).forward(batch), "in a step")


def test_right_backends_merge_over_ranks() -> None:
    assert failures(TorchBackend, context_parallel.checks, Level.FULL) == {}
    assert failures(variant("PLAIN", impl=PlainImpl), context_parallel.checks) == {}


def test_the_ranks_have_all_tokens_once() -> None:
    for ranks in (1, 2, 3, 4):
        for runs in (1, 2, 5, 16):
            sharing = context_parallel._Sharing(ranks, runs)
            for tokens in (0, 1, 5, 37):
                every = [
                    position for rank in range(ranks) for position in sharing.positions(tokens, rank).tolist()
                ]
                assert sorted(every) == list(range(tokens))


@pytest.mark.parametrize("mutant", mutants_of("ranks"), ids=lambda mutant: mutant.name)
def test_a_mistake_of_a_rank_is_named(mutant: Mutant) -> None:
    found = failures(mutant.backend, context_parallel.checks)
    assert found
    for name, problem in found.items():
        assert isinstance(problem, ConformanceError)
        # In half precision a small mistake shows in the merged result alone, where no name is looked for.
        is_small = name.endswith("float16") and "each part alone is within its tolerance" in str(problem)
        assert str(problem.named).startswith(mutant.says) or is_small
        assert "ranks with runs of" in str(problem)
        assert len(str(problem).splitlines()) <= 11


def test_backends_without_partial_results_are_not_asked() -> None:
    features = TorchBackend.features
    for flag in ("LSE", "NON_CAUSAL"):
        less = variant("LESS", features=features & ~type(features)[flag])
        assert list(context_parallel.checks(Target(less, Device("cpu")))) == []
