"""Builders share nothing with each other, and one metadata serves layers that differ."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from attnplug.testing.batches import Batch, layer_tensors
from attnplug.testing.conformance.builders import kept_of
from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.conformance.driving import Answer, Driver
from attnplug.testing.conformance.steps import kinds, layer_of_kind, mixed, step_of
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
    make = step_of(target, spec, mixed(target.block_size(spec)))
    batches = list(_layers_over(target, make()))
    driver, what = Driver.of(target, *batches), "one metadata for several layers of a KV group"
    with during(what):
        metadata = driver.builder.build(0, batches[0].common)
        found = [driver.run(batch, metadata, layer=i) for i, batch in enumerate(batches)]
    for index, (batch, answer) in enumerate(zip(batches, found, strict=True)):
        try:
            compare(batch, answer)
        except AssertionError as problem:
            named, because = None, ""
            # The oracle of this layer's keys, read as the first layer is.
            as_first = dataclasses.replace(batch, spec=spec, tensors=batches[0].tensors)
            if index and agrees(as_first, Answer(answer.output, None)):
                named = "the first layer's scale, cap, sinks or slopes"
                because = f"; these are the numbers of {named}"
            raise ConformanceError(f"{what}, layer {index}: {problem}{because}", named) from None


def _layers_over(target: Target, batch: Batch) -> Iterator[Batch]:
    """Layers over the step of `batch` that have caches and tensors of their own, and ask for other things."""
    yield batch
    asked: tuple[dict[str, Any], ...] = (
        {"scale": batch.spec.scale / 2},
        {"logits_soft_cap": 3.0},
        {"has_sinks": True},
        {"has_alibi": True},
    )
    for seed, fields in enumerate(asked, 1):
        spec = batch.spec.replace(**fields)
        if target.reasons(spec) or batch.kv_cache is None:
            continue
        yield dataclasses.replace(
            batch,
            spec=spec,
            tensors=layer_tensors(spec, seed=seed, device=target.torch_device),
            key=-batch.key,
            kv_cache=-batch.kv_cache,
            keys=[-keys for keys in batch.keys],
            values=[-values for values in batch.values],
            value=-batch.value,
        )
