"""Scales of the engine's layer that do not belong to a call change no number of it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from attnplug.testing.conformance.check import Check
from attnplug.testing.conformance.expectations import expect_correct
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.steps import scenario_factory, scenarios
from attnplug.testing.conformance.target import Target

_SCALES = {
    "_q_scale": "is for queries that come quantised",
    "_k_scale": "is for a cache that stores keys quantised",
    "_v_scale": "is for a cache that stores values quantised",
    "_prob_scale": "is for weights that a kernel quantises",
}
"""By attribute of AttentionLayer, why a layer in full precision does not use it."""
_OF_STORED = ("_k_scale", "_v_scale")


def checks(target: Target) -> Iterator[Check]:
    """One check in each scenario."""
    for scenario in scenarios(target):
        summary = "the engine's scales do not change the numbers of a layer that quantises nothing"
        yield Check.of(f"tensors/unused-scales-{scenario}", summary, _check_unused, target, scenario)


def _check_unused(target: Target, scenario: str) -> None:
    for name, why in _SCALES.items():
        batch = scenario_factory(target, scenario)()
        if batch.spec.has_quantized_kv_cache and name in _OF_STORED:
            continue
        harness, scale = Harness.of(target, batch), 0.37
        setattr(harness.layers[0], name, torch.tensor(scale, device=batch.query.device))
        setattr(harness.layers[0], f"{name}_float", scale)
        found = harness.forward(batch)
        expect_correct(batch, found, f"with {name}={scale} in the engine's layer, which {why}")
