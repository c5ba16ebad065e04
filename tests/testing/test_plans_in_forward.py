"""A plan that is made in the first forward of a step is right where no graphs are declared."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from catching import variant

from attnplug.backends.torch_native.builder import TorchMetadataBuilder
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import AttentionCGSupport, Device
from attnplug.testing.conformance.check import CheckSkipped, ConformanceError
from attnplug.testing.conformance.serving import gpu
from attnplug.testing.conformance.target import Target


class PlansLate(TorchImpl):
    """Plans in the first forward of a step, and keeps the plan with the step's metadata."""

    def attend(
        self, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, *rest: Any, **more: Any
    ):
        lengths = metadata.plans.setdefault("lengths", metadata.seq_lens.copy())
        planned = dataclasses.replace(metadata, seq_lens=lengths)
        return super().attend(layer, query, key, value, cache, planned, *rest, **more)


class DeclaresGraphs(TorchMetadataBuilder):
    """Declares graphs over TORCH's lengths on the host."""

    cudagraph_support = AttentionCGSupport.ALWAYS


def test_a_plan_in_forward_is_allowed_where_no_graphs_are_declared_and_else_the_rule_is_told() -> None:
    def captured(**parts: Any) -> Any:
        (found,) = gpu.capture_checks(Target(variant("PLANS_LATE", impl=PlansLate, **parts), Device("cpu")))
        return found

    with pytest.raises(CheckSkipped):
        captured()()
    with pytest.raises(ConformanceError, match="rule: a builder that declares CUDA graphs plans in build"):
        captured(builder=DeclaresGraphs)()
