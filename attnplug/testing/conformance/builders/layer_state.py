"""Layers, steps and outputs of equal form are kept apart: by no shape, address or number of a dropped object.

One process serves layers of any dtypes, sizes and tensors one after another; each keeps its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from attnplug.core.features import Feature
from attnplug.core.spec import LayerSpec
from attnplug.registry.plugins.waiting import guarded_call
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.cases.steps import (
    decode_lengths,
    layer_kinds,
    layer_of_kind,
    mixed_lengths,
    scenario_factory,
    scenario_layer,
    scenario_steps,
    scenarios,
    step_factory,
)
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    CheckTable,
    ConformanceError,
    checks_from,
    error_context,
)
from attnplug.testing.conformance.harness import Harness, raw_bytes, refill
from attnplug.testing.conformance.layer_names import layer_names, unlike_names
from attnplug.testing.conformance.mistakes.expectations import (
    difference,
    expect_correct,
    expect_correct_step,
    expect_own_slots,
    stale_mistakes,
    wrong_answer,
)
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import layer_tensors

_OUTPUTS = 10
_ROUNDS = 12

_LIKE: tuple[dict[str, Any], ...] = (
    {},
    {"scale": 0.07},
    {"window": (6, 0)},
    {"window": (19, 0)},
    {"logits_soft_cap": 3.7},
    {"logits_soft_cap": 11.5},
    {"has_sinks": True},
    {"has_alibi": True},
    {"causal": False},
    {"needs_lse": True},
)
"""Layers of one shape."""


def checks(target: Target) -> Iterator[Check]:
    """The checks of outputs in each scenario, of layers over pages, and of buffers for each kind of layer."""
    for scenario in scenarios(target):
        yield from checks_from(_CHECKS, "state", target, scenario)
    for kind in layer_kinds(target):
        summary = "a step in the buffers of the last step, filled again, is a step of its own"
        yield Check.of(f"state/refilled-buffers-{kind}", summary, _check_refilled, target, kind)


def _check_outputs(target: Target, scenario: str) -> None:
    batches = [scenario_factory(target, scenario, seed=seed)() for seed in range(3)]
    harness = Harness.of(target, *batches)
    kept: list[tuple[Batch, torch.Tensor, torch.Tensor]] = []
    for number in range(_OUTPUTS):
        batch, layer = batches[number % 3], harness.layers[number % 2]
        metadata = harness.build(batch)
        with error_context("forward without output"):
            made = layer.impl.forward(layer, batch.query, batch.key, batch.value, batch.kv_cache, metadata)
        kept.append((batch, made, raw_bytes(made)))
    for number, (_, made, before) in enumerate(kept):
        if not torch.equal(raw_bytes(made), before):
            raise ConformanceError(f"the output of step {number + 1} changed when later steps ran")
        for later, (_, other, _) in enumerate(kept[number + 1 :], number + 1):
            if made.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and made.numel():
                raise ConformanceError(
                    f"the outputs of steps {number + 1} and {later + 1} are one memory: "
                    "forward without output must make a new tensor in each call"
                )


def _check_like(target: Target, scenario: str) -> None:
    made: list[tuple[str, Batch]] = []
    base = scenario_layer(target, scenario)
    like = (*_LIKE, {"chunk_size": 2 * target.block_size(base)})
    for seed, (fields, spec) in enumerate(target.variants(base, like, set())):
        made.append((_words(fields), scenario_steps(target, scenario, spec, seed)()))
    # In both orders, since a cache may take the first layer's state or the last one's.
    for name, batch in (*made, *reversed(made)):
        what = f"a layer with {name}, after layers of the same shape that ask for other things"
        expect_correct(batch, Harness.of(target, batch).forward(batch, what=what), what)


def _words(fields: dict[str, Any]) -> str:
    return ", ".join(f"{field}={value}" for field, value in fields.items()) or "nothing more"


def _check_dropped(target: Target, scenario: str) -> None:
    base = scenario_layer(target, scenario)
    for number in range(_ROUNDS):
        # Python and torch give the memory of what was dropped in the last round to this one.
        spec = target.changed(base, scale=base.scale * (1 + number % 3))
        batch = scenario_steps(target, scenario, spec, number)()
        what = f"layer {number + 1}, made after a layer of its shape was dropped"
        found = Harness.of(target, batch).forward(batch, what=what)
        expect_correct(batch, found, what)
        del spec, batch, found


def _check_refilled(target: Target, kind: str) -> None:
    spec, size = layer_of_kind(target, kind)
    forwards, backwards = decode_lengths(size), decode_lengths(size, 2)
    backwards = backwards[0], backwards[1][::-1]
    for steps in (
        (mixed_lengths(size), mixed_lengths(size, 2), mixed_lengths(size), mixed_lengths(size, 1)),
        (forwards, decode_lengths(size, 1), backwards, forwards),
    ):
        first = step_factory(target, spec, steps[0])()
        harness, before = Harness.of(target, first), first
        for number, lengths in enumerate(steps):
            make = step_factory(target, spec, lengths, number)
            fresh = make()
            batch, what = refill(first, fresh), f"step {number + 1} in the same buffers"
            with error_context(what):
                metadata = harness.builder.build(0, batch.common)
                expect_own_slots(metadata, fresh.common, what)
                found = harness.run(batch, metadata)
            mistakes = stale_mistakes(before.common) if number else {}
            expect_correct_step(target, make, found, what, mistakes)
            before = fresh


_CHECKS: CheckTable = {
    "outputs-apart": (_check_outputs, "an output stays as it is when later steps run"),
    "like-layers": (_check_like, "layers of one shape that ask for different things share no state"),
    "dropped-layers": (_check_dropped, "a later layer uses nothing of a dropped layer, step or cache"),
}
_MOST_KEYS = 4
_LATER = "state of a layer that the process served before"


def unlike_layer_checks(target: Target) -> Iterator[Check]:
    """The unlike_layer_checks of layers one after another."""
    summary = "layers of other dtypes, storage types and head sizes do not disturb each other"
    yield Check.of("layers/unlike", summary, _check_unlike, target)
    summary = "layers are not known by the number, the start or the end of their names"
    yield Check.of("layers/names", summary, _check_names, target)
    learned = {Feature.SINKS: ("sinks", "has_sinks"), Feature.ALIBI: ("alibi_slopes", "has_alibi")}
    for feature, (name, flag) in learned.items():
        if feature in target.backend.features:
            summary = f"two layers of one spec and one name have {name} of their own"
            yield Check.of(f"layers/own-{name}", summary, _check_own, target, **{flag: True})
    if Feature.SLIDING_WINDOW in target.backend.features:
        summary = "two layers have windows of their own"
        yield Check.of("layers/own-window", summary, _check_windows, target)


def _check_unlike(target: Target) -> None:
    # The least precise first, since a layer that takes its dtype for that of all is right for more precise ones.
    dtypes = reversed(target.dtypes)
    layers: dict[str, dict[str, Any]] = {f"dtype={name}": {"dtype": name} for name in dtypes}
    layers |= {f"kv_cache_dtype={name}": {"kv_cache_dtype": name} for name in target.kv_cache_dtypes}
    layers |= {f"head_size={size}": {"head_size": size} for size in target.head_sizes[:3]}
    _expect_each(target, layers, lambda spec, seed: _batch(target, spec, seed))


def _check_names(target: Target) -> None:
    base = target.spec()
    # As many layers as there are names, so that each has its turn.
    changes = (*_LIKE, *({"scale": scale} for scale in (0.11, 0.2, 0.31)))
    layers = {_words(fields): fields for fields, _ in target.variants(base, changes, set())}
    names = layer_names(len(layers), "layers/names")
    run = functools.partial(_expect_each, target, layers, functools.partial(_batch, target))
    try:
        run(names)
    except ConformanceError as problem:
        if guarded_call(run, unlike_names(len(layers)))[1] is not None:
            raise
        mistake = "a layer known by a part of its name"
        given = f"the layers are {', '.join(names)}; with names that share no part they are right"
        raise ConformanceError(f"{problem}\n{mistake}: {given}", mistake) from problem


def _check_own(target: Target, **fields: Any) -> None:
    layers = {"one": fields, "another of the same spec": fields}

    def make(spec: LayerSpec, seed: int) -> Batch:
        batch, own = _batch(target, spec, seed), layer_tensors(spec, seed=seed, device=target.torch_device)
        slopes = own.alibi_slopes
        if slopes is not None and seed:
            slopes = slopes.flip(0).contiguous()
        # The scales stay those with which the cache was filled.
        tensors = dataclasses.replace(batch.tensors, sinks=own.sinks, alibi_slopes=slopes)
        return dataclasses.replace(batch, tensors=tensors)

    _expect_each(target, layers, make)


def _check_windows(target: Target) -> None:
    layers = {f"window={window}": {"window": window} for window in ((6, 0), (15, 0))}
    _expect_each(target, layers, lambda spec, seed: _batch(target, spec, seed))


def _batch(target: Target, spec: LayerSpec, seed: int) -> Batch:
    scales: dict[str, Any] = {}
    if spec.has_kv_scales:
        scales = {"k_scale": 0.37 * (1 + seed), "v_scale": 1.9 / (1 + seed)}
    return target.batch(spec, *decode_lengths(target.block_size(spec)), seed=seed, **scales)


def _expect_each(
    target: Target,
    layers: dict[str, dict[str, Any]],
    make: Callable[[LayerSpec, int], Batch],
    names: Sequence[str] = (),
) -> None:
    """Make all layers first, with `names` if given, then run each twice: in this order, and in the opposite one."""
    made: dict[str, tuple[Harness, Callable[[], Batch]]] = {}
    keys: set[Hashable] = set()
    for seed, (name, fields) in enumerate(layers.items()):
        try:
            spec = target.spec(**fields)
        except CheckSkipped:
            continue
        key = target.backend.compile_key(spec)
        if key is not None and key not in keys and len(keys) >= _MOST_KEYS:
            continue  # each such layer compiles kernels of its own
        keys.add(key)

        again = functools.partial(make, spec, seed)
        # The harness is made now, so that all layers are made before any runs.
        made[name] = Harness.of(target, again(), names=names[seed : seed + 1]), again
    if not made:
        raise CheckSkipped(f"{target.name} serves none of these layers: {', '.join(layers)}")
    for name in (*made, *reversed(made)):
        harness, fresh = made[name]
        batch, what = fresh(), f"the layer with {name}, among layers with {', '.join(made)}"
        found = harness.forward(batch, what=what)
        if problem := difference(batch, found):
            alone = Harness.of(target, fresh()).forward(fresh())
            raise wrong_answer(f"{what}: {problem}", None if difference(fresh(), alone) else _LATER)
