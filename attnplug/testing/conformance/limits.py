"""Sizes, dtypes, devices and phases that a backend does not declare it refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from attnplug.core.blocks import MultipleOf
from attnplug.core.device import Device
from attnplug.core.dtypes import DTYPES
from attnplug.core.spec import AttentionType, Phase
from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.conformance.refusals import expect_refused, reasons_for
from attnplug.testing.conformance.spec_grid import devices
from attnplug.testing.conformance.target import Target

__all__ = ["checks"]

_KV_DTYPES = ("unheard_of_3bit", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "int8", "nvfp4")
_HEAD_SIZES = (1, 7, 24, 72, 80, 320, 1009, 65536)
_BLOCK_SIZES = (1, 3, 7, 24, 100, 1009, 2**20)


def checks(target: Target) -> Iterator[Check]:
    """One check for each limit that there is."""
    for name, (limits, run, summary) in _CHECKS.items():
        if limits(target):
            yield Check(f"refused/{name}", functools.partial(run, target), summary)


def _sizes_beyond(target: Target) -> list[int]:
    sizes = target.backend.get_supported_head_sizes()
    return [size for size in _HEAD_SIZES if sizes and not MultipleOf.allows(sizes, size)]


def _check_head_size(target: Target) -> None:
    spec = target.spec()
    for size in _sizes_beyond(target):
        expect_refused(target, spec.replace(head_size=size), f"head_size={size}", ("head_size",))


def _dtypes_beyond(target: Target) -> list[str]:
    return [name for name in DTYPES if name not in target.dtypes]


def _check_dtype(target: Target) -> None:
    spec = target.spec()
    for name in _dtypes_beyond(target):
        expect_refused(target, spec.replace(dtype=name), f"dtype={name!r}", ("dtype",))


def _storage_beyond(target: Target) -> list[str]:
    declared = {*target.kv_cache_dtypes, *(["fp8_e4m3"] if "fp8" in target.kv_cache_dtypes else [])}
    return [name for name in _KV_DTYPES if name not in declared]


def _check_kv_cache_dtype(target: Target) -> None:
    spec = target.spec()
    for name in _storage_beyond(target):
        what = f"kv_cache_dtype={name!r}"
        expect_refused(target, spec.replace(kv_cache_dtype=name), what, ("kv_cache_dtype",))


def _blocks_beyond(target: Target) -> list[int]:
    sizes = target.backend.get_supported_kernel_block_sizes()
    return [size for size in _BLOCK_SIZES if not MultipleOf.allows(sizes, size)]


def _check_block_size(target: Target) -> None:
    spec = target.spec()
    for size in _blocks_beyond(target):
        expect_refused(target, spec.replace(block_size=size), f"block_size={size}", ("block_size",))


def _kinds_beyond(target: Target) -> list[AttentionType]:
    return [kind for kind in AttentionType if not target.backend.supports_attn_type(kind)]


def _check_attn_type(target: Target) -> None:
    spec = target.spec()
    for kind in _kinds_beyond(target):
        expect_refused(target, spec.replace(attn_type=kind), f"attn_type={str(kind)!r}", ("attn_type",))


def _check_device_type(target: Target) -> None:
    spec = target.spec()
    for device in devices(target):
        if device.type not in target.backend.device_types:
            expect_refused(target, spec, f"the device {device}", ("device_type",), device)


def _incapable(target: Target) -> list[Device]:
    pairs = ((1, 0), (7, 5), (8, 0), (9, 0), (99, 9))
    return [
        Device(kind, pair)
        for kind in ("cuda", "rocm")
        if kind in target.backend.device_types
        for pair in pairs
        if not target.backend.supports_compute_capability(pair)
    ]


def _check_capability(target: Target) -> None:
    spec = target.spec()
    for device in _incapable(target):
        expect_refused(target, spec, f"the device {device}", ("compute_capability",), device)
        bare = Device(device.type)
        expect_refused(
            target, spec, f"the device {bare} of a capability not known", ("compute_capability",), bare
        )


def _phases_beyond(target: Target) -> list[Phase]:
    served = {str(phase) for phase in target.backend.supported_phases}
    return [phase for phase in Phase if phase not in served]


def _check_phase(target: Target) -> None:
    spec = target.spec()
    for phase in _phases_beyond(target):
        expect_refused(target, spec, f"the phase {phase}", ("phase",), phase=phase)
        if "phase" not in {reason.code for reason in reasons_for(target, spec, "both phases")}:
            raise ConformanceError(f"both phases, {phase} among them, are not refused with the code phase")


_CHECKS: dict[str, tuple[Callable[[Target], Sequence[object]], Callable[[Target], None], str]] = {
    "head-size": (_sizes_beyond, _check_head_size, "head sizes that it does not declare are refused"),
    "dtype": (_dtypes_beyond, _check_dtype, "so are other dtypes"),
    "kv-cache-dtype": (
        _storage_beyond,
        _check_kv_cache_dtype,
        "so are other storage types, unheard-of ones too",
    ),
    "block-size": (_blocks_beyond, _check_block_size, "so are other block sizes"),
    "attn-type": (_kinds_beyond, _check_attn_type, "so are other attention types"),
    "device-type": (devices, _check_device_type, "so are other types of devices"),
    "compute-capability": (_incapable, _check_capability, "so are devices of other compute capabilities"),
    "phase": (_phases_beyond, _check_phase, "so are phases that it does not serve"),
}
