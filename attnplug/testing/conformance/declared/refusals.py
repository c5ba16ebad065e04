"""What a backend has not among its features it refuses, with a reason of the right code.

A backend refuses the sizes, dtypes, devices and phases that it does not declare.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from attnplug.core.blocks import MultipleOf
from attnplug.core.device import Device
from attnplug.core.dtypes import DTYPES
from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.kv_format import kv_format, kv_formats
from attnplug.core.reasons import REASON_CODES, Reason
from attnplug.core.spec import AttentionType, LayerSpec, Phase
from attnplug.testing.conformance.cases.spec_grid import (
    asking_for,
    askings,
    devices,
    one_change_each,
    plainest,
)
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, SkipKind, error_context
from attnplug.testing.conformance.target import Target, layer_fields

_KNOWN_CODES = frozenset(REASON_CODES) - {"feature"} | {f"feature.{name}" for name in (~Feature(0)).names()}


def checks(target: Target) -> Iterator[Check]:
    """One check for each feature: of those declared, that it is the declaration which admits them."""
    backend = target.backend
    for feature in Feature:
        name = feature.names()[0]
        if feature not in backend.features and not _served_by_another(target, feature):
            summary = f"a layer that asks for {name}, which is not declared, is refused"
            yield Check.of(f"refused/feature-{name}", summary, _check_feature, target, feature)
        elif (
            feature in backend.features and feature.ask.declared_by is None
        ):  # else a method of the class admits it
            summary = (
                f"without {name} in its features the same class refuses it: nothing is served by default"
            )
            yield Check.of(f"refused/withdrawn-{name}", summary, _check_withdrawn, target, feature)


def _served_by_another(target: Target, feature: Feature) -> bool:
    """Whether another class serves layers with the feature under the backend's name, which is checked by itself."""
    if target.is_latent:
        return False
    try:
        spec = asking_for(target, plainest(target), feature)
    except SpecError:
        return False  # no layer of the kind that it serves can ask for it
    serving = target.backend.for_layer(spec)
    return serving is not target.backend and feature in serving.features


def reasons_for(
    target: Target, spec: LayerSpec, what: str, device: Device | None = None, phase: Phase | None = None
) -> list[Reason]:
    """What validate_configuration says; ConformanceError unless that is a list of Reasons with known codes."""
    where = device or target.device
    with error_context(f"validate_configuration for {what} on {where}"):
        found: object = target.backend.validate_configuration(spec, where, phase)
    if not isinstance(found, list):
        raise ConformanceError(
            f"validate_configuration for {what} gave {found!r}; it must give a list of Reasons"
        )
    for reason in found:
        if not isinstance(reason, Reason):
            raise ConformanceError(
                f"validate_configuration for {what} gave {reason!r}, which is not a Reason"
            )
        if reason.code not in _KNOWN_CODES:
            raise ConformanceError(
                f"validate_configuration for {what} gave the unknown code {reason.code!r}: {reason}"
            )
        if not reason.strip():
            raise ConformanceError(
                f"validate_configuration for {what} gave the code {reason.code!r} without a sentence"
            )
    return found


def expect_refused(
    target: Target,
    spec: LayerSpec,
    what: str,
    codes: Collection[str],
    device: Device | None = None,
    phase: Phase | None = None,
) -> None:
    """ConformanceError unless `spec`, which asks for `what`, is refused with one of `codes`.

    Without a `phase` a backend of one answers for that: it refuses each layer in the other.
    """
    reasons = reasons_for(target, spec, what, device, target.phase if phase is None else phase)
    if not reasons:
        raise ConformanceError(f"{what} is accepted, though it is not declared: it would be ignored")
    if not any(reason.code in codes for reason in reasons):
        found = "; ".join(f"{reason.code}: {reason}" for reason in reasons)
        raise ConformanceError(f"{what} is refused, but not with the code {' or '.join(codes)}: {found}")


def _asking(target: Target, base: LayerSpec, feature: Feature) -> LayerSpec:
    name, kind = feature.names()[0], f"no layer of the kind that {target.name} serves"
    try:
        spec = asking_for(target, base, feature)
    except SpecError as problem:
        raise CheckSkipped(f"{kind} can ask for {name}: {problem}", SkipKind.LAYER) from None
    if feature not in spec.required_features():
        raise CheckSkipped(f"{kind} asks for {name}", SkipKind.LAYER)
    return spec


def _check_feature(target: Target, feature: Feature) -> None:
    name = feature.names()[0]
    base = plainest(target)
    spec = _asking(target, base, feature)
    # A backend that does not store fp8 refuses the storage dtype, and says no more.
    codes = (feature.code, *(("kv_cache_dtype",) if feature is Feature.FP8_KV else ()))
    expect_refused(target, spec, f"a layer that asks for {name}", codes)
    _expect_none(target, base, feature, "")


def _expect_none(target: Target, base: LayerSpec, feature: Feature, when: str) -> None:
    """ConformanceError if any layer like `base` that asks for `feature` is accepted, also beside other things."""
    for what, spec in askings(base, feature).items():
        if feature in target.backend.for_layer(spec).features:
            continue  # another class serves it under the backend's name
        layer = f"a layer with {what}"
        if not reasons_for(target, spec, layer, phase=target.phase):
            name = feature.names()[0]
            raise ConformanceError(
                f"{layer} is accepted{when}, though {name} is not declared: it would be ignored; "
                f"other layers that ask for {name} are refused"
            )


def _check_withdrawn(target: Target, feature: Feature) -> None:
    backend, name = target.backend, feature.names()[0]
    base = plainest(target)
    spec = _asking(target, base, feature)
    without = type(backend.__name__, (backend,), {"features": backend.features & ~feature})
    narrowed = Target(without, target.device, target.level)
    expect_refused(narrowed, spec, f"a layer that asks for {name}, once features lacks it,", (feature.code,))
    _expect_none(narrowed, base, feature, f" once features lacks {name}")


_HEAD_SIZES = (1, 7, 24, 72, 80, 320, 1009, 65536)
_BLOCK_SIZES = (1, 3, 7, 24, 100, 1009, 2**20)
_CAPABILITIES = ((1, 0), (7, 5), (8, 0), (9, 0), (99, 9))


def limit_checks(target: Target) -> Iterator[Check]:
    """One check for each limit that the backend has."""
    for field, values in _undeclared_values(target).items():
        if values:
            summary = f"a {field} that the backend does not declare is refused"
            yield Check.of(f"refused/{field.replace('_', '-')}", summary, _check_field, target, field, values)
    summary = "a device of an undeclared type is refused"
    yield Check.of("refused/device-type", summary, _check_device_type, target)
    capable = target.backend.supports_compute_capability
    kinds = [kind for kind in ("cuda", "rocm") if kind in target.backend.device_types]
    if incapable := [Device(kind, pair) for kind in kinds for pair in _CAPABILITIES if not capable(pair)]:
        summary = "a device of an undeclared capability is refused"
        yield Check.of("refused/compute-capability", summary, _check_capability, target, incapable)
    served = {str(phase) for phase in target.backend.supported_phases}
    if unserved := [phase for phase in Phase if phase not in served]:
        summary = "a phase that the backend does not declare is refused"
        yield Check.of("refused/phase", summary, _check_phase, target, unserved)


def _undeclared_values(target: Target) -> dict[str, list[Any]]:
    """By field of LayerSpec, values that the backend does not declare."""
    backend = target.backend
    head_sizes, block_sizes = backend.get_supported_head_sizes(), backend.get_supported_kernel_block_sizes()
    stored = {kv_format(name).name for name in target.kv_cache_dtypes}
    quantized = ("unheard_of_3bit", *(row.name for row in kv_formats() if row.is_quantized))
    return {
        "head_size": [n for n in _HEAD_SIZES if head_sizes and not MultipleOf.allows(head_sizes, n)],
        "dtype": [name for name in DTYPES if name not in target.dtypes],
        "kv_cache_dtype": [name for name in quantized if name not in stored],
        "block_size": [n for n in _BLOCK_SIZES if not MultipleOf.allows(block_sizes, n)],
        "attn_type": [str(kind) for kind in AttentionType if not backend.supports_attn_type(kind)],
    }


def _check_field(target: Target, field: str, values: Sequence[Any]) -> None:
    spec = plainest(target)
    if field == "block_size" and spec.direct_kv:
        raise CheckSkipped(f"{target.name} serves no layer with pages", SkipKind.LAYER)
    asked = 0
    for value in values:
        # A layer of latents that is no decoder cannot be asked for at all.
        if field == "attn_type" and target.is_latent:
            continue
        changed = layer_fields(target.sized(value)) if field == "head_size" else {field: value}
        try:
            asking = spec.replace(**changed)
        except SpecError:
            continue  # no layer of the kind that is served can ask for it
        asked += 1
        expect_refused(target, asking, f"{field}={value!r}", (field,))
        _expect_refused_beside(target, asking, field, f"{field}={value!r}")
    if not asked:
        raise CheckSkipped(
            f"no layer of the kind that {target.name} serves has another {field}", SkipKind.LAYER
        )


def _expect_refused_beside(target: Target, asking: LayerSpec, field: str, what: str) -> None:
    """ConformanceError if the layer is accepted as soon as it asks for one thing more."""
    for more, fields in one_change_each(asking).items():
        try:
            spec = asking.replace(**fields)
        except SpecError:
            continue
        has_pages = not spec.direct_kv or field not in ("block_size", "kv_cache_dtype")
        if field in fields or not has_pages or target.backend.for_layer(spec) is not target.backend:
            continue  # it asks for another value or for none, or another class serves it under the backend's name
        if not reasons_for(target, spec, f"{what} beside {more}", phase=target.phase):
            raise ConformanceError(f"{what} beside {more} is accepted, though {what} alone is refused")


def _check_device_type(target: Target) -> None:
    spec = plainest(target)
    for device in devices(target):
        if device.type not in target.backend.device_types:
            expect_refused(target, spec, f"the device {device}", ("device_type",), device)


def _check_capability(target: Target, incapable: Sequence[Device]) -> None:
    spec, codes = plainest(target), ("compute_capability",)
    for device in incapable:
        expect_refused(target, spec, f"the device {device}", codes, device)
        bare = Device(device.type)
        expect_refused(target, spec, f"the device {bare} of unknown capability", codes, bare)


def _check_phase(target: Target, unserved: Sequence[Phase]) -> None:
    spec = plainest(target)
    for phase in unserved:
        expect_refused(target, spec, f"the phase {phase}", ("phase",), phase=phase)
        if "phase" not in {reason.code for reason in reasons_for(target, spec, "both phases")}:
            raise ConformanceError(f"both phases, {phase} among them, are not refused with the code phase")
