"""Builders share nothing with each other, and one metadata serves layers that differ."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from attnplug.testing.batches import Batch, layer_tensors
from attnplug.testing.conformance.builders import kept_of
from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.conformance.driving import Answer, Driver
from attnplug.testing.conformance.steps import kinds, layer_of_kind, long_decodes, mixed, step_of
from attnplug.testing.conformance.target import Target
from attnplug.testing.conformance.verdicts import agrees, check_slots, compare, during, judge

__all__ = ["checks"]


def checks(target: Target) -> Iterator[Check]:
    """What is shared and what is not, for each kind of layer that the backend declares."""
    for kind in kinds(target):
        run = functools.partial(_check_two_builders, target, kind)
        yield Check(f"builder/two-builders-{kind}", run, "builders share no state")
        run = functools.partial(_check_layers, target, kind)
        summary = "one metadata serves layers with scales, caps, sinks and slopes of their own"
        yield Check(f"builder/several-layers-{kind}", run, summary)


def _check_two_builders(target: Target, kind: str) -> None:
    spec = layer_of_kind(target, kind)
    size = target.block_size(spec)
    makes = step_of(target, spec, mixed(size)), step_of(target, spec, mixed(size, 2), 1)
    batches = [make() for make in makes]
    drivers = [Driver.of(target, batch) for batch in batches]
    what = "two builders that both build before either's layer runs"
    with during(what):
        built = [
            driver.builder.build(0, batch.common) for driver, batch in zip(drivers, batches, strict=True)
        ]
        for batch, metadata in zip(batches, built, strict=True):
            check_slots(metadata, batch.common, what)
        found = [drivers[index].run(batches[index], built[index]) for index in range(2)]
    for make, answer, other in zip(makes, found, reversed(batches), strict=True):
        judge(target, make, answer, what, kept_of(other.common))


def _check_layers(target: Target, kind: str) -> None:
    spec = layer_of_kind(target, kind)
    size = target.block_size(spec)
    for lengths in (mixed(size), long_decodes(size)):
        layers = _layers_over(target, step_of(target, spec, lengths)())
        _check_one_metadata(target, layers)


def _check_one_metadata(target: Target, layers: Mapping[str, Batch]) -> None:
    names, batches = list(layers), list(layers.values())
    driver, what = Driver.of(target, *batches), "one metadata for several layers of a KV group"
    with during(what):
        metadata = driver.builder.build(0, batches[0].common)
        # There and back, since what one layer leaves behind may disturb only those after it.
        places = [*range(len(batches)), *reversed(range(len(batches)))]
        found = [driver.run(batches[place], metadata, layer=place) for place in places]
    for place, answer in zip(places, found, strict=True):
        try:
            compare(batches[place], answer)
        except AssertionError as problem:
            named, because = None, ""
            # The oracle of this layer's keys, read as the first layer is.
            first = batches[0]
            as_first = dataclasses.replace(batches[place], spec=first.spec, tensors=first.tensors)
            if place and agrees(as_first, Answer(answer.output, None)):
                named = "the first layer's scale, cap, sinks or slopes"
                because = f"; these are the numbers of {named}"
            raise ConformanceError(
                f"{what} ({', '.join(names)}), the layer with {names[place]}: {problem}{because}", named
            ) from None


def _layers_over(target: Target, batch: Batch) -> dict[str, Batch]:
    """Layers over one step that have caches and tensors of their own, by what each asks beyond the first."""
    layers = {"nothing more": batch}
    asked: dict[str, dict[str, Any]] = {
        "another scale": {"scale": batch.spec.scale / 2},
        "a soft cap": {"logits_soft_cap": 3.0},
        "sinks": {"has_sinks": True},
        "ALiBi": {"has_alibi": True},
    }
    for seed, (name, fields) in enumerate(asked.items(), 1):
        spec = batch.spec.replace(**fields)
        if target.reasons(spec) or batch.kv_cache is None:
            continue
        layers[name] = dataclasses.replace(
            batch,
            spec=spec,
            tensors=layer_tensors(spec, seed=seed, device=target.torch_device),
            key=-batch.key,
            value=-batch.value,
            kv_cache=-batch.kv_cache,
            keys=[-keys for keys in batch.keys],
            values=[-values for values in batch.values],
        )
    return layers
