"""validate_configuration answers for every layer with a list of reasons, and accepted layers are served."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterator

from attnplug.core.kv_format import kv_format
from attnplug.core.spec import LayerSpec, Phase
from attnplug.testing.batches import direct_batch
from attnplug.testing.comparison import assert_close
from attnplug.testing.conformance.cases.spec_grid import PHASES, devices, grid
from attnplug.testing.conformance.check import (
    Check,
    CheckSkipped,
    CheckTable,
    ConformanceError,
    Level,
    checks_from,
    error_context,
    reworded,
)
from attnplug.testing.conformance.declared.refusals import reasons_for
from attnplug.testing.conformance.harness import Harness, make_impl
from attnplug.testing.conformance.mistakes.expectations import expect_correct
from attnplug.testing.conformance.target import Target
from attnplug.testing.drawn_values import layer_tensors
from attnplug.testing.oracle import COMPUTED

_FEWEST_ELEMENTS = 8
"""Elements of an output row that can be compared with the row's own magnitude."""
_MAX_COMPILE_KEYS = {Level.SMOKE: 3, Level.FULL: 12}


def checks(target: Target) -> Iterator[Check]:
    """The checks over the grid of layers, devices and phases."""
    return checks_from(_CHECKS, "refused", target)


def _check_layers(target: Target) -> None:
    for what, spec in grid(target).items():
        reasons_for(target, spec, f"a layer with {what}")


def _check_devices(target: Target) -> None:
    for what, spec in grid(target, pairs=False).items():
        for device in devices(target):
            for phase in PHASES:
                reasons_for(target, spec, f"a layer with {what}, phase={phase},", device, phase)


def _check_causes(target: Target) -> None:
    for what, spec in grid(target).items():
        reasons = reasons_for(target, spec, f"a layer with {what}")
        causes = Counter(f"{reason.code} ({reason.field})" for reason in reasons)
        if twice := [cause for cause, count in causes.items() if count > 1]:
            raise ConformanceError(f"a layer with {what} is refused twice for one cause: {', '.join(twice)}")


def _check_both_phases(target: Target) -> None:
    for what, spec in grid(target).items():
        layer = f"a layer with {what}"
        each = {phase: reasons_for(target, spec, layer, phase=phase) for phase in Phase}
        both = {reason.code for reason in reasons_for(target, spec, layer)}
        for phase, reasons in each.items():
            if missing := {reason.code for reason in reasons} - both:
                found = f"{phase} alone is refused with {', '.join(sorted(missing))}, phase=None is not"
                raise ConformanceError(f"{layer}: {found}, though it means both phases")
        if both and not any(each.values()):
            raise ConformanceError(
                f"{layer}: phase=None is refused with {', '.join(sorted(both))}, no phase alone is"
            )


def _check_combination(target: Target) -> None:
    for what, spec in grid(target).items():
        with error_context(f"supports_combination for a layer with {what}"):
            why: object = target.backend.supports_combination(spec, target.device)
        if why is not None and not (isinstance(why, str) and why.strip()):
            found = f"supports_combination for a layer with {what} gave {why!r}"
            raise ConformanceError(f"{found}; it must give None or a sentence")
        if why and not reasons_for(target, spec, f"a layer with {what}", phase=target.phase):
            raise ConformanceError(
                f"a layer with {what} is accepted, though supports_combination says: {why}"
            )


def _check_served(target: Target) -> None:
    keys: set[Hashable] = set()
    served = False
    for what, spec in grid(target).items():
        if reasons_for(target, spec, f"a layer with {what}", phase=target.phase):
            continue
        served = True
        try:
            with contextlib.suppress(CheckSkipped):  # the options of the run are refused for this layer
                _serve(target, spec, keys)
        except ConformanceError as problem:
            raise reworded(problem, f"a layer with {what} is accepted, and then {problem}") from problem
    if not served:
        raise CheckSkipped(f"{target.name} serves no layer of the grid")


def _serve(target: Target, spec: LayerSpec, keys: set[Hashable]) -> None:
    """Make, build and run an accepted layer, and compare its numbers with the oracle's.

    The layer is only made where a run would compile too many kernels.

    `keys` collects the compile keys of the layers that were run.
    """
    with error_context("for_layer"):
        # Another class may serve a kind of layer under the backend's name, with pages of its own.
        target = dataclasses.replace(target, backend=target.backend.for_layer(spec))
    is_known = kv_format(spec.resolved_kv_cache_dtype).has_numbers
    key = target.backend.compile_key(spec)
    few = key is None or key in keys or len(keys) < _MAX_COMPILE_KEYS[target.level]
    with error_context("from_spec"):
        tensors = layer_tensors(spec, device=target.torch_device)
        make_impl(target.backend, spec, tensors, options=target.own_options)
    # The kit has no inputs for other storage types, and none for features that the oracle does not compute.
    if spec.required_features() & ~COMPUTED or not is_known or not few:
        return
    keys.add(key)
    # A backend that accepts a layer without pages for it fails here.
    with error_context("get_kv_cache_shape and split_kv, for the tokens of a step"):
        if spec.is_encoder:
            batch = direct_batch(spec, [3, 9], [3, 9], padding=1, device=target.torch_device)
        else:
            batch = target.batch(spec, [1, 5], [29, 14], padding=1)
    found, what = Harness.of(target, batch).forward(batch), "runs with wrong numbers"
    tokens = batch.common.num_actual_tokens
    if spec.head_size_v < _FEWEST_ELEMENTS:
        # Rounding errors are relative to a row's magnitude, and a row of one element may be near 0.
        numbers, expected = found.output[:tokens].flatten(1), batch.oracle().output.flatten(1)
        try:
            assert_close(numbers[:, None], expected[:, None], batch.bound)
        except AssertionError as problem:
            raise ConformanceError(f"{what}: {problem}") from None
        return
    expect_correct(batch, found, what)


_CHECKS: CheckTable = {
    "any-layer": (
        _check_layers,
        "validate_configuration gives a list of reasons with known codes for any layer",
    ),
    "any-device": (_check_devices, "it does so for any device and any phase"),
    "one-reason-per-cause": (_check_causes, "each cause is reported once"),
    "both-phases": (_check_both_phases, "without a phase, the reasons include those of both phases"),
    "combination": (
        _check_combination,
        "supports_combination gives None or a sentence, and validate_configuration includes it",
    ),
    "never-after-acceptance": (_check_served, "an accepted layer is served, with the numbers of the oracle"),
}
