"""What a backend has not among its features it refuses, with a reason of the right code."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from attnplug.core.device import Device
from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.reasons import REASON_CODES, Reason
from attnplug.core.spec import LayerSpec, Phase
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, SkipKind, error_context
from attnplug.testing.conformance.spec_grid import asking_for, askings, plainest
from attnplug.testing.conformance.target import Target

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
        spec = asking_for(plainest(target), feature)
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

    Without a `phase` a backend of one is asked about that: the other it refuses whatever the layer.
    """
    reasons = reasons_for(target, spec, what, device, target.phase if phase is None else phase)
    if not reasons:
        raise ConformanceError(f"{what} is accepted, though it is not declared: it would be ignored")
    if not any(reason.code in codes for reason in reasons):
        found = "; ".join(f"{reason.code}: {reason}" for reason in reasons)
        raise ConformanceError(f"{what} is refused, but not with the code {' or '.join(codes)}: {found}")


def _asking(target: Target, feature: Feature) -> LayerSpec:
    name, kind = feature.names()[0], f"no layer of the kind that {target.name} serves"
    try:
        spec = asking_for(plainest(target), feature)
    except SpecError as problem:
        raise CheckSkipped(f"{kind} can ask for {name}: {problem}", SkipKind.LAYER) from None
    if feature not in spec.required_features():
        raise CheckSkipped(f"{kind} asks for {name}", SkipKind.LAYER)
    return spec


def _check_feature(target: Target, feature: Feature) -> None:
    name = feature.names()[0]
    spec = _asking(target, feature)
    # A backend that does not store fp8 refuses the storage dtype, and says no more.
    codes = (feature.code, *(("kv_cache_dtype",) if feature is Feature.FP8_KV else ()))
    expect_refused(target, spec, f"a layer that asks for {name}", codes)
    _expect_none(target, feature, "")


def _expect_none(target: Target, feature: Feature, when: str) -> None:
    """ConformanceError if any layer that asks for `feature` is accepted, also beside other things."""
    for what, spec in askings(plainest(target), feature).items():
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
    spec = _asking(target, feature)
    without = type(backend.__name__, (backend,), {"features": backend.features & ~feature})
    narrowed = Target(without, target.device, target.level)
    expect_refused(
        narrowed, spec, f"a layer that asks for {name}, once features lacks it,", (f"feature.{name}",)
    )
    _expect_none(narrowed, feature, f" once features lacks {name}")
