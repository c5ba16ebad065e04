"""Copies on the host that a step may lack are not needed, or their absence is a BatchError."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from attnplug.core.errors import BatchError
from attnplug.core.features import Feature
from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.conformance.expectations import expect_correct
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.steps import scenario_factory
from attnplug.testing.conformance.target import Target

_COPIES: dict[str, tuple[Feature, tuple[str, ...], dict[str, bool]]] = {
    "key_start_loc_cpu": (Feature.DIRECT_KV, ("direct",), {}),
    "mm_prefix_spans_cpu": (Feature.MM_PREFIX, ("decode", "mixed"), {"mm_prefix": True}),
}
"""Optional fields of a step, the feature that needs each, and the scenarios and layers that have it."""


def checks(target: Target) -> Iterator[Check]:
    """One check for each copy that the backend may read."""
    for name, (feature, scenarios, fields) in _COPIES.items():
        if feature in target.backend.features:
            for scenario in scenarios:
                summary = f"a step without {name} gives the same result, or is a BatchError"
                check_id = f"builder/no-{name}-{scenario}"
                yield Check.of(check_id, summary, _check_absent, target, name, scenario, **fields)


def _check_absent(target: Target, name: str, scenario: str, **fields: bool) -> None:
    batch = scenario_factory(target, scenario, **fields)()
    device = name.removesuffix("_cpu")
    absent: dict[str, Any] = {name: None}
    batch = dataclasses.replace(batch, common=dataclasses.replace(batch.common, **absent))
    what = f"with {name}=None in a step that has {device} on the device"
    try:
        found = Harness.of(target, batch).forward(batch, what=what)
    except ConformanceError as problem:
        if isinstance(problem.__cause__, BatchError):
            return
        raise
    expect_correct(batch, found, what)
