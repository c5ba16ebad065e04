"""A backend refuses the sizes, dtypes, devices and phases that it does not declare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from attnplug.core.blocks import MultipleOf
from attnplug.core.device import Device
from attnplug.core.dtypes import DTYPES
from attnplug.core.errors import SpecError
from attnplug.core.spec import AttentionType, LayerSpec, Phase
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError, SkipKind
from attnplug.testing.conformance.latent_sizes import fields_of, pair_of
from attnplug.testing.conformance.refusals import expect_refused, reasons_for
from attnplug.testing.conformance.spec_grid import beside, devices, plainest
from attnplug.testing.conformance.target import Target

_KV_DTYPES = ("unheard_of_3bit", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "int8", "nvfp4")
_HEAD_SIZES = (1, 7, 24, 72, 80, 320, 1009, 65536)
_BLOCK_SIZES = (1, 3, 7, 24, 100, 1009, 2**20)
_CAPABILITIES = ((1, 0), (7, 5), (8, 0), (9, 0), (99, 9))


def checks(target: Target) -> Iterator[Check]:
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
    stored = {*target.kv_cache_dtypes, *(["fp8_e4m3"] if "fp8" in target.kv_cache_dtypes else [])}
    return {
        "head_size": [n for n in _HEAD_SIZES if head_sizes and not MultipleOf.allows(head_sizes, n)],
        "dtype": [name for name in DTYPES if name not in target.dtypes],
        "kv_cache_dtype": [name for name in _KV_DTYPES if name not in stored],
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
        changed = {field: value}
        if field == "head_size" and target.is_latent:
            changed = fields_of(pair_of(target.backend, value))
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
    for more, fields in beside(asking).items():
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
