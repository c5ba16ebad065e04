"""Whatever a backend is asked it answers with reasons, never raises, and keeps what it promises."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator

from attnplug.core.spec import AttentionType, LayerSpec, Phase
from attnplug.ops.storage import STORAGE_DTYPES
from attnplug.testing.batches import Batch, direct_batch, layer_tensors
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, Level
from attnplug.testing.conformance.refusals import reasons_for
from attnplug.testing.conformance.single_layer import SingleLayer, default_options
from attnplug.testing.conformance.spec_grid import PHASES, devices, grid
from attnplug.testing.conformance.target import Target
from attnplug.testing.conformance.verdicts import during

__all__ = ["checks"]

_MAX_COMPILE_KEYS = {Level.SMOKE: 3, Level.FULL: 12}


def checks(target: Target) -> Iterator[Check]:
    """The checks over the grid of layers, devices and phases."""
    for name, (run, summary) in _CHECKS.items():
        yield Check(f"refused/{name}", functools.partial(run, target), summary)


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
        causes = [(reason.code, reason.field) for reason in reasons]
        if twice := [
            f"{code} ({field})" for code, field in dict.fromkeys(causes) if causes.count((code, field)) > 1
        ]:
            raise ConformanceError(f"a layer with {what} is refused twice for one cause: {', '.join(twice)}")


def _check_both_phases(target: Target) -> None:
    for what, spec in grid(target).items():
        layer = f"a layer with {what}"
        each = {phase: reasons_for(target, spec, layer, phase=phase) for phase in Phase}
        both = {reason.code for reason in reasons_for(target, spec, layer)}
        for phase, reasons in each.items():
            if missing := {reason.code for reason in reasons} - both:
                found = f"{phase} alone is refused with {', '.join(sorted(missing))}, phase=None is not"
                raise ConformanceError(f"{layer}: {found}, though it asks for both phases")
        if both and not any(each.values()):
            raise ConformanceError(
                f"{layer}: phase=None is refused with {', '.join(sorted(both))}, no phase alone is"
            )


def _check_combination(target: Target) -> None:
    for what, spec in grid(target).items():
        with during(f"supports_combination for a layer with {what}"):
            why: object = target.backend.supports_combination(spec, target.device)
        if why is not None and not (isinstance(why, str) and why.strip()):
            raise ConformanceError(
                f"supports_combination for a layer with {what} gave {why!r}; it must give None or a sentence"
            )
        if why and not reasons_for(target, spec, f"a layer with {what}", phase=target.phase):
            raise ConformanceError(
                f"a layer with {what} is accepted, though supports_combination says: {why}"
            )


def _check_kept(target: Target) -> None:
    keys: set[Hashable] = set()
    tried = 0
    for what, spec in grid(target).items():
        if reasons_for(target, spec, f"a layer with {what}", phase=target.phase):
            continue
        tried += 1
        try:
            _serve(target, spec, keys)
        except ConformanceError as problem:
            raise ConformanceError(f"a layer with {what} is accepted, and then {problem}") from problem
    if not tried:
        raise CheckSkipped(f"{target.name} serves no layer so plain")


def _serve(target: Target, spec: LayerSpec, keys: set[Hashable]) -> None:
    """from_spec for an accepted layer, and build and forward, either of which may compile, where little is compiled."""
    stored = STORAGE_DTYPES.get(spec.resolved_kv_cache_dtype)
    is_known = stored is not None and stored.is_floating_point
    key = target.backend.compile_key(spec)
    few = key is None or key in keys or len(keys) < _MAX_COMPILE_KEYS[target.level]
    if spec.mla is not None or spec.sparse or spec.mm_prefix or not is_known or not few:
        _make_only(target, spec)
        return
    keys.add(key)
    batch = _batch(target, spec)
    layer = SingleLayer.of(target, batch)
    layer.build(batch)
    layer.forward(batch)


def _make_only(target: Target, spec: LayerSpec) -> None:
    """Such layers need more inputs, or other storage, than a batch of the kit has."""
    with during("from_spec"):
        tensors = layer_tensors(spec, device=target.torch_device)
        target.backend.get_impl_cls().from_spec(
            spec,
            backend=target.backend,
            layer_name="layer",
            tensors=tensors,
            options=default_options(target),
        )


def _batch(target: Target, spec: LayerSpec) -> Batch:
    if spec.attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY):
        return direct_batch(spec, [3, 9], [3, 9], device=target.torch_device)
    return target.batch(spec, [1, 5], [9, 5])


_CHECKS: dict[str, tuple[Callable[[Target], None], str]] = {
    "any-layer": (_check_layers, "any layer is answered with a list of reasons, and known codes"),
    "any-device": (_check_devices, "so is any device, here or not, and any phase"),
    "one-reason-per-cause": (_check_causes, "no cause is reported twice"),
    "both-phases": (_check_both_phases, "without a phase the reasons are those of both phases"),
    "combination": (_check_combination, "supports_combination gives None or a sentence, and is heeded"),
    "never-after-acceptance": (
        _check_kept,
        "an accepted layer is not refused by from_spec, build or forward",
    ),
}
