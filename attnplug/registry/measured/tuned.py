"""A table of measured times: which backend was how fast for which layer on which device."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import json
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from attnplug.core.device import find_gpu, same_gpu_name
from attnplug.core.spec import LayerSpec, Phase
from attnplug.registry.measured.comparisons import PhaseTimes
from attnplug.registry.measured.sharing_prices import MeasuredPrices, TablePrices, decodes_of
from attnplug.registry.measured.step_shapes import StepShape
from attnplug.registry.plugins.installed import installed_version
from attnplug.registry.plugins.records import canonical_name

if TYPE_CHECKING:
    from attnplug.core.device import Device
    from attnplug.registry.plugins.installed import Assumed, BackendVersions
    from attnplug.registry.selection.evidence import Pages

SCHEMA = "attnplug.tuned"
VERSION = 1

_SUBJECT = ("backend", "distribution", "version")
_FIGURES = ("us", "build_us", "spread", "rounds", "date", "why")
LayerKey: TypeAlias = tuple[Any, ...]

# The scale changes no kernel, pages are compared row by row, and "auto" and "fp8" name a dtype in other words.
_LEFT_OUT = {"scale", "block_size", "kv_cache_dtype"}
_KEY_FIELDS = tuple(f.name for f in dataclasses.fields(LayerSpec) if f.init and f.name not in _LEFT_OUT)
_key_values = operator.attrgetter(*_KEY_FIELDS)


def layer_key(spec: LayerSpec) -> LayerKey:
    """All of a layer that changes which kernel runs and how long: times are those of equal keys only."""
    return (spec.resolved_kv_cache_dtype, *_key_values(spec))


def device_slug(device: Device) -> str | None:
    """The name of a device in file names: "h200", "cpu"; None for a GPU of unknown name."""
    if device.name is None:
        return device.type if device.type not in ("cuda", "rocm", "xpu") else None
    known = find_gpu(device.name)
    name = device.name if known is None else known.name
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or None


class RowStatus(enum.StrEnum):
    """The outcome of a measurement."""

    MEASURED = "measured"
    WRONG = "wrong"
    """Its output differed from the reference, so it was not timed."""
    CRASHED = "crashed"
    """Its process ended, hung, or it raised an exception."""


@dataclasses.dataclass(frozen=True, slots=True)
class TimedRow:
    """The measurement of one backend for one layer and step.

    Args:
        subject: the backend, its version and the versions of its libraries.
        shape: the step.
        pages: tokens per page and layout; None where K and V are arguments of the call.
        status: measured, wrong or crashed.
        us: microseconds of one layer's attention: the median of the rounds' medians; 0 if not measured.
        build_us: microseconds of the host to build the metadata of a step, for all layers of the group together.
        spread: median absolute deviation of the rounds, relative to `us`.
        rounds: number of rounds.
        date: when it was measured, with its offset from UTC.
        why: why it was not measured, or why its time is uncertain; else "".
    """

    subject: BackendVersions
    shape: StepShape
    pages: Pages
    status: RowStatus = RowStatus.MEASURED
    us: float = 0.0
    build_us: float = 0.0
    spread: float = 0.0
    rounds: int = 0
    date: str = ""
    why: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether it has a time."""
        return self.status is RowStatus.MEASURED


@dataclasses.dataclass(frozen=True)
class TunedLayer:
    """The measurements of one kind of layer.

    Args:
        spec: the layer, with no block size.
        count: layers of the model that are like it; a step costs `count` times the kernel and one build.
        workload: the shapes with their weights.
        rows: the measurements.
        prices: those of shared prefixes, of the backends that share them.
    """

    spec: LayerSpec
    count: int
    workload: tuple[tuple[StepShape, float], ...]
    rows: tuple[TimedRow, ...]
    prices: tuple[MeasuredPrices, ...] = ()

    def cost(self, row: TimedRow) -> float:
        """Microseconds of a step of the model: its layers like this one, and one build of their metadata."""
        return self.count * row.us + row.build_us


# Compared by identity: it is part of the key under which decisions are remembered.
@dataclasses.dataclass(frozen=True, eq=False)
class TunedTable:
    """Measured times of backends on one device; it reorders candidates, and nothing else.

    Args:
        device: the device of all rows.
        layers: the layers that were measured.
        environment: names and versions for people: driver, CUDA, Python, ...
        policy: how the times were measured.
        choices: the choices when it was written, for people; selections compute theirs from the rows.
        path: the file that it was read from.
    """

    device: Device
    layers: tuple[TunedLayer, ...]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    policy: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    choices: tuple[Mapping[str, Any], ...] = ()
    path: Path | None = None

    @functools.cached_property
    def digest(self) -> str:
        """16 hexadecimal digits of the contents. Processes that must make the same choices compare them."""
        import hashlib

        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """The file's name, or the digest of a table that was not read from a file."""
        return f"tuned table {self.digest[:8] if self.path is None else self.path.name}"

    @functools.cached_property
    def by_key(self) -> Mapping[LayerKey, TunedLayer]:
        """The layers by what their kernels depend on."""
        return {layer_key(layer.spec): layer for layer in self.layers}

    @functools.cached_property
    def times(self) -> Mapping[LayerKey, Mapping[Phase | None, PhaseTimes]]:
        """The times of each layer, compared by phase; None compares the steps of all phases."""
        return {
            key: {phase: PhaseTimes(layer, phase, self.digest) for phase in (None, *Phase)}
            for key, layer in self.by_key.items()
        }

    @functools.cached_property
    def _version_verdicts(self) -> dict[tuple[bool, Assumed], Mapping[int, str | None]]:
        return {}

    def other_versions(self, *, here: bool, assumed: Assumed) -> Mapping[int, str | None]:
        """For the `id` of each row's subject, what `other_version` says of it: computed once for all layers."""
        # Remembered, because a process looks up each installed version only once too.
        key = here, assumed
        found = self._version_verdicts.get(key)
        if found is None:
            subjects = [row.subject for layer in self.layers for row in layer.rows]
            subjects += [row.subject for layer in self.layers for row in layer.prices]
            why = {each: other_version(each, here=here, assumed=assumed) for each in dict.fromkeys(subjects)}
            # A hash of a subject takes longer than all else of a look-up.
            found = self._version_verdicts[key] = {id(each): why[each] for each in subjects}
        return found

    def prices_of(self, spec: LayerSpec, backend: str, *, here: bool, assumed: Assumed) -> TablePrices | None:
        """The prices of shared prefixes of a layer, of the backend that attends its decodes; None if there are none."""
        layer = self.by_key.get(layer_key(spec))
        if layer is None or not layer.prices:
            return None
        others, name = self.other_versions(here=here, assumed=assumed), decodes_of(backend)
        for each in layer.prices:
            if each.subject.backend == name and others[id(each.subject)] is None:
                return TablePrices(each.prices, f"{self.name}, measured {each.date[:10]}")
        return None

    def is_for(self, device: Device) -> bool:
        """Whether its times are of this device: the same type, capability and name."""
        mine = self.device
        if (mine.type, mine.capability) != (device.type, device.capability):
            return False
        # An H200 and an H100 have one capability, so without a name nobody knows whose times these are.
        if mine.name is None or device.name is None:
            return mine.name is device.name
        return same_gpu_name(mine.name, device.name)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object with every field but the path."""
        rows = [(index, row) for index, layer in enumerate(self.layers) for row in layer.rows]
        prices = [(index, each) for index, layer in enumerate(self.layers) for each in layer.prices]
        measured = [row.subject for _, row in rows] + [row.subject for _, row in prices]
        subjects = list(dict.fromkeys(measured))
        place = {subject: index for index, subject in enumerate(subjects)}
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "device": self.device.to_dict(),
            "environment": dict(self.environment),
            "policy": dict(self.policy),
            "subjects": [
                {**{name: getattr(each, name) for name in _SUBJECT}, "versions": dict(each.versions)}
                for each in subjects
            ],
            "layers": [
                {
                    "spec": layer.spec.to_dict(),
                    "count": layer.count,
                    "workload": [{**shape.to_dict(), "weight": weight} for shape, weight in layer.workload],
                }
                for layer in self.layers
            ],
            "cells": [
                {
                    "layer": index,
                    "subject": place[row.subject],
                    **row.shape.to_dict(),
                    "block_size": row.pages and row.pages[0],
                    "layout": row.pages and row.pages[1],
                    "status": str(row.status),
                    **{name: getattr(row, name) for name in _FIGURES},
                }
                for index, row in rows
            ],
            "choices": [dict(choice) for choice in self.choices],
            # Files of an attnplug that measured none have no such field.
            **(
                {"prices": [_price(index, place[each.subject], each) for index, each in prices]}
                if prices
                else {}
            ),
        }

    def at(self, *shapes: StepShape) -> TunedTable:
        """The table with, for each layer, only the measured shapes around `shapes` in each phase.

        These are the nearest one, in the logarithms of batch and context, ragged and speculative shapes to their like
        first; and the nearest one on the other side: with more requests if that has fewer, and the reverse. Between
        two steps a backend that wins at one of them may be far behind, so it must not lose at the other.
        """
        layers = []
        for layer in self.layers:
            kept = {each for shape in shapes for each in _around(shape, layer)}
            workload = tuple((shape, weight) for shape, weight in layer.workload if shape in kept)
            rows = tuple(row for row in layer.rows if row.shape in kept)
            layers.append(dataclasses.replace(layer, workload=workload, rows=rows))
        return dataclasses.replace(self, layers=tuple(layers), choices=())


def _price(layer: int, subject: int, row: MeasuredPrices) -> dict[str, Any]:
    about = {"layer": layer, "subject": subject, "error": row.error, "steps": row.steps, "date": row.date}
    return {**about, **row.prices.to_dict()}


def _around(wanted: StepShape, layer: TunedLayer) -> Iterator[StepShape]:
    """The measured shapes of a layer around a shape of the same phase: none, one or two."""
    nearer = sorted(
        (each for each, _ in layer.workload if each.phase is wanted.phase),
        key=functools.partial(_distance, wanted),
    )
    yield from nearer[:1]
    if nearer and nearer[0].batch != wanted.batch:
        is_below = nearer[0].batch < wanted.batch
        others = (
            each
            for each in nearer
            if each.batch != wanted.batch
            and (each.batch > wanted.batch) is is_below
            and (each.ragged, each.query > 1) == (wanted.ragged, wanted.query > 1)
        )
        yield from itertools.islice(others, 1)


def _distance(wanted: StepShape, other: StepShape) -> tuple[float, str]:
    far = abs(math.log2(wanted.batch / other.batch)) + abs(math.log2(wanted.context / other.context))
    far += abs(math.log2(wanted.query / other.query)) + (wanted.ragged is not other.ragged)
    return far, str(other)


def other_version(subject: BackendVersions, *, here: bool, assumed: Assumed) -> str | None:
    """The first version that is not the one measured: "flashinfer-python 0.6.13, and 0.7.2 is installed".

    Args:
        subject: the backend that was measured.
        here: whether the device is one of this machine. Versions installed here say nothing about another machine.
        assumed: versions to judge by instead of the installed ones.
    """
    if assumed == "all":
        return None
    known = dict(assumed) if isinstance(assumed, tuple) else {}
    for name, version in subject.versions:
        found, what = known.get(canonical_name(name)), "assumed"
        if found is None:
            if not here:
                continue
            found, what = installed_version(name), "installed"
        if found != version:
            return f"{name} {version}, and {found or 'none'} is {what}"
    return None


def merged(layers: Iterable[TunedLayer], newer: Iterable[TunedLayer]) -> tuple[TunedLayer, ...]:
    """The layers of both; a newer tuning of a layer replaces the older one whole."""
    found = {layer_key(layer.spec): layer for layer in layers}
    return tuple({**found, **{layer_key(layer.spec): layer for layer in newer}}.values())
