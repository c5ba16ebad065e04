"""Honest builders, merges and runtimes fail no check, and what a backend refuses is skipped with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from capturable import Capturable
from catching import failures, variant
from mutants.edges import OwnerOfBlock

from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.core import AttentionBackend, Device, Feature
from attnplug.core.errors import BatchError
from attnplug.testing.conformance.builders import builder_inputs, builders
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError
from attnplug.testing.conformance.numbers import common_prefix, merging
from attnplug.testing.conformance.serving import runtimes
from attnplug.testing.conformance.target import Target

GROUPS = tuple(
    module.checks for module in (builders, builder_inputs, common_prefix, builders, merging, runtimes)
)


class NeedsExactLengths(TorchMetadataBuilder):
    """A correct builder that needs exact host lengths, declares so, and refuses batches without."""

    needs_host_seq_lens = "exact"

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        if common_attn_metadata.seq_lens_host is None or not common_attn_metadata.seq_lens_host_exact:
            raise BatchError("seq_lens_host", None, "must be exact")
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


EXACT = variant("EXACT", builder=NeedsExactLengths)


def every(start: str = "") -> Callable[[Target], Iterator[Check]]:
    def checks(target: Target) -> Iterator[Check]:
        return (check for group in GROUPS for check in group(target) if check.id.startswith(start))

    return checks


def test_a_wrong_step_is_not_said_to_leave_out_a_prefix_that_it_was_not_given() -> None:
    (problem,) = failures(
        variant("OWNER", builder=OwnerOfBlock), every("builder/common-prefix-full")
    ).values()
    assert isinstance(problem, ConformanceError)
    assert "build(common_prefix_len=0) of 4 requests" in str(problem)
    assert problem.named == "causal aligned at the start"


@pytest.mark.parametrize("backend", [TorchBackend, Capturable], ids=lambda backend: backend.get_name())
def test_an_honest_backend_fails_none(backend: type[AttentionBackend]) -> None:
    assert failures(backend, every()) == {}


def test_a_builder_that_needs_exact_lengths_and_says_so_fails_none() -> None:
    assert failures(EXACT, every("builder/")) == {}


def test_partial_results_are_checked_only_where_they_can_be_merged() -> None:
    def listed(features: Feature) -> list[str]:
        backend = variant("FEW", features=features)
        return [check.id for check in merging.checks(Target(backend, Device("cpu")))]

    assert listed(Feature.SINKS | Feature.NON_CAUSAL) == []
    parts = [f"merge/{each}" for each in ("2-parts", "3-parts", "empty-part")]
    assert set(parts) <= set(listed(Feature.LSE))
    assert "merge/context-and-new" in listed(Feature.LSE | Feature.NON_CAUSAL)
    assert "merge/use_sinks" in listed(Feature.LSE | Feature.SINKS)


@pytest.mark.parametrize(
    ("refusal", "check"),
    [
        (lambda cls, spec, device: None if spec.causal else "not beside others", "merge/context-and-new"),
        (
            lambda cls, spec, device: "no pages of that size" if spec.block_size else None,
            "builder/build-full",
        ),
    ],
)
def test_what_the_backend_refuses_is_skipped_with_its_reason(refusal: Any, check: str) -> None:
    target = Target(variant("REFUSES", supports_combination=refusal), Device("cpu"))
    found = next(each for group in GROUPS for each in group(target) if each.id == check)
    with pytest.raises(CheckSkipped, match=r"not beside others|no pages of that size"):
        found()
