"""Builders share no state, and one metadata serves several layers of a group."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from attnplug.testing.batches import Batch
from attnplug.testing.conformance.builders import stale_mistakes
from attnplug.testing.conformance.check import Check, error_context
from attnplug.testing.conformance.expectations import (
    difference,
    expect_correct,
    expect_correct_step,
    expect_own_slots,
)
from attnplug.testing.conformance.harness import Answer, Harness
from attnplug.testing.conformance.steps import layer_of_kind, long_decodes, mixed, paged_kinds, step_factory
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import layer_tensors


def checks(target: Target) -> Iterator[Check]:
    """The checks of several builders and of several layers, for each kind of layer that the backend declares."""
    for kind in paged_kinds(target):
        yield Check.of(
            f"builder/two-builders-{kind}", "builders share no state", _check_two_builders, target, kind
        )
        summary = "one metadata serves layers with scales, caps, sinks and slopes of their own"
        yield Check.of(f"builder/several-layers-{kind}", summary, _check_layers, target, kind)


def _check_two_builders(target: Target, kind: str) -> None:
    spec, size = layer_of_kind(target, kind, paged=True)
    makes = (step_factory(target, spec, mixed(size)), step_factory(target, spec, mixed(size, 2), 1))
    batches = [make() for make in makes]
    harnesses = [Harness.of(target, batch) for batch in batches]
    what = "two builders that build before the layer of either runs"
    with error_context(what):
        built = [
            harness.builder.build(0, batch.common) for harness, batch in zip(harnesses, batches, strict=True)
        ]
        for batch, metadata in zip(batches, built, strict=True):
            expect_own_slots(metadata, batch.common, what)
        found = [harnesses[index].run(batches[index], built[index]) for index in range(2)]
    for make, answer, other in zip(makes, found, reversed(batches), strict=True):
        expect_correct_step(target, make, answer, what, stale_mistakes(other.common))


def _check_layers(target: Target, kind: str) -> None:
    spec, size = layer_of_kind(target, kind, paged=True)
    for lengths in (mixed(size), long_decodes(size)):
        _check_one_metadata(target, _layers_over(target, step_factory(target, spec, lengths)()))


def _check_one_metadata(target: Target, layers: Mapping[str, Batch]) -> None:
    names, batches = list(layers), list(layers.values())
    harness, what = Harness.of(target, *batches), "one metadata for several layers of a KV group"
    with error_context(what):
        metadata = harness.builder.build(0, batches[0].common)
        # In both orders, since a layer may disturb only the layers after it.
        places = [*range(len(batches)), *reversed(range(len(batches)))]
        found = [harness.run(batches[place], metadata, layer=place) for place in places]
    for place, answer in zip(places, found, strict=True):
        mistake = functools.partial(_first_layer_mistake, batches[0], batches[place], answer)
        layer = f"{what} ({', '.join(names)}), the layer with {names[place]}"
        expect_correct(batches[place], answer, layer, mistake)


def _first_layer_mistake(first: Batch, batch: Batch, answer: Answer) -> str | None:
    as_first = dataclasses.replace(batch, spec=first.spec, tensors=first.tensors)
    if batch is first or difference(as_first, Answer(answer.output, None)):
        return None
    return "the first layer's scale, cap, sinks or slopes"


def _layers_over(target: Target, batch: Batch) -> dict[str, Batch]:
    """Layers over one step with caches and tensors of their own, by the feature that each adds to the first."""
    layers = {"nothing more": batch}
    features: dict[str, dict[str, Any]] = {
        "other keys": {},
        "another scale": {"scale": batch.spec.scale / 2},
        "a soft cap": {"logits_soft_cap": 3.0},
        "sinks": {"has_sinks": True},
        "other sinks": {"has_sinks": True},
        "ALiBi": {"has_alibi": True},
        **({"no spans": {"mm_prefix": False}} if batch.spec.mm_prefix and batch.spec.sparse is None else {}),
    }
    for seed, (name, fields) in enumerate(features.items(), 1):
        spec = batch.spec.replace(**fields)
        if target.reasons(spec) or batch.kv_cache is None:
            continue
        # Also layers with equal specs have other keys than the one before.
        sign = -1 if len(layers) % 2 else 1
        layers[name] = dataclasses.replace(
            batch,
            spec=spec,
            tensors=layer_tensors(spec, seed=seed, device=target.torch_device),
            key=sign * batch.key,
            value=sign * batch.value,
            # torch negates no fp8 values.
            kv_cache=(sign * batch.kv_cache.float()).to(batch.kv_cache.dtype),
            keys=[sign * keys for keys in batch.keys],
            values=[sign * values for values in batch.values],
        )
    return layers
