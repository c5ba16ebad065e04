"""One process serves layers of any dtypes, sizes and tensors one after another; each keeps its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from attnplug.core.features import Feature
from attnplug.core.spec import LayerSpec
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.check import Check, CheckSkipped
from attnplug.testing.conformance.expectations import difference, wrong_answer
from attnplug.testing.conformance.harness import Harness
from attnplug.testing.conformance.steps import decodes
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import layer_tensors

_MOST_KEYS = 4
_LATER = "state of a layer that the process served before"


def checks(target: Target) -> Iterator[Check]:
    """The checks of layers one after another."""
    summary = "layers of other dtypes, storage types and head sizes do not disturb each other"
    yield Check.of("layers/unlike", summary, _check_unlike, target)
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
    if spec.has_quantized_kv_cache:
        scales = {"k_scale": 0.37 * (1 + seed), "v_scale": 1.9 / (1 + seed)}
    return target.batch(spec, *decodes(target.block_size(spec)), seed=seed, **scales)


def _expect_each(
    target: Target, layers: dict[str, dict[str, Any]], make: Callable[[LayerSpec, int], Batch]
) -> None:
    """Make all layers first, then run each twice: in this order, and in the opposite one."""
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
        made[name] = Harness.of(target, again()), again
    if not made:
        raise CheckSkipped(f"{target.name} serves none of these layers: {', '.join(layers)}")
    for name in (*made, *reversed(made)):
        harness, fresh = made[name]
        batch, what = fresh(), f"the layer with {name}, among layers with {', '.join(made)}"
        found = harness.forward(batch, what=what)
        if problem := difference(batch, found):
            alone = Harness.of(target, fresh()).forward(fresh())
            raise wrong_answer(f"{what}: {problem}", None if difference(fresh(), alone) else _LATER)
