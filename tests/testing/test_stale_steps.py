"""Builders that keep a part of an earlier step are named by the check of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from catching import failures, variant

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.core import CommonAttentionMetadata
from attnplug.testing.conformance.cases.steps import with_lengths
from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.conformance.numbers import requests
from attnplug.testing.conformance.target import Target


class KeepsLengths(TorchMetadataBuilder):
    """Takes the lengths of the first step for those of all steps with as many requests."""

    _first: CommonAttentionMetadata | None = None

    def build(
        self, common_prefix_len: int, common: CommonAttentionMetadata, *rest: Any, **options: Any
    ) -> Any:
        first = self._first = self._first or common
        if first.num_reqs == common.num_reqs:
            common = self.stale(common, first)
        return super().build(common_prefix_len, common, *rest, **options)

    def stale(
        self, common: CommonAttentionMetadata, first: CommonAttentionMetadata
    ) -> CommonAttentionMetadata:
        return with_lengths(common, first.seq_lens.cpu())


class KeepsTables(KeepsLengths):
    """Takes the first step's block table where all lengths are the same."""

    def stale(
        self, common: CommonAttentionMetadata, first: CommonAttentionMetadata
    ) -> CommonAttentionMetadata:
        if not torch.equal(common.seq_lens, first.seq_lens):
            return common
        return dataclasses.replace(common, block_table_tensor=first.block_table_tensor)


def states(target: Target) -> Iterator[Check]:
    return (check for check in requests.checks(target) if check.id == "batch/no-state-decode")


@pytest.mark.parametrize(
    ("builder", "says"),
    [
        (KeepsLengths, "another step's lengths, of step 1"),
        (KeepsTables, "another step's block table, of step 1"),
    ],
)
def test_what_is_kept_of_a_step_is_named(builder: type[TorchMetadataBuilder], says: str) -> None:
    found = failures(variant("KEEPS", builder=builder), states)
    problem = found["batch/no-state-decode"]
    assert isinstance(problem, ConformanceError)
    assert problem.named == says
    assert "of one impl and builder, after other batches" in str(problem)
