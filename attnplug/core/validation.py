"""The checks behind AttentionBackend.validate_configuration, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attnplug.core.blocks import MultipleOf
from attnplug.core.dtypes import bare_dtype_name, kv_cache_dtype_name
from attnplug.core.features import Feature
from attnplug.core.reasons import Reason
from attnplug.core.spec import AttentionType

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend
    from attnplug.core.device import Device
    from attnplug.core.spec import LayerSpec, Phase


def validate(
    backend: type[AttentionBackend], spec: LayerSpec, device: Device, phase: Phase | None
) -> list[Reason]:
    """Every reason why `backend` does not serve `spec`; see `validate_configuration`."""
    return [
        *_sizes_and_dtypes(backend, spec, device),
        *_kinds(backend, spec),
        *_device(backend, device),
        *_roles(backend, spec, phase),
        *_combination(backend, spec, device),
        *_features(backend, spec),
    ]


def _sizes_and_dtypes(backend: type[AttentionBackend], spec: LayerSpec, device: Device) -> Iterator[Reason]:
    values_differ = Feature.HEAD_SIZE_V in spec.required_features() & backend.features
    for field in ("head_size", "head_size_v") if values_differ else ("head_size",):
        size = getattr(spec, field)
        if not backend.supports_head_size(size):
            yield Reason(
                f"{field} not supported",
                code="head_size",
                field=field,
                requested=size,
                supported=backend.get_supported_head_sizes(),
            )
    dtypes = [bare_dtype_name(dtype, "supported_dtypes") for dtype in backend.supported_dtypes]
    if spec.dtype not in dtypes:
        yield Reason(
            "dtype not supported", code="dtype", field="dtype", requested=spec.dtype, supported=dtypes
        )
    if not _stores(backend, spec):
        yield Reason(
            "kv_cache_dtype not supported",
            code="kv_cache_dtype",
            field="kv_cache_dtype",
            requested=spec.kv_cache_dtype,
            supported=backend.supported_kv_cache_dtypes,
        )
    blocks = backend.get_supported_kernel_block_sizes(spec, device)
    if spec.block_size is not None and not spec.direct_kv and not MultipleOf.allows(blocks, spec.block_size):
        yield Reason(
            "block_size not supported",
            code="block_size",
            field="block_size",
            requested=spec.block_size,
            supported=blocks,
            remedy="leave block_size unset and the backend chooses",
        )


def _stores(backend: type[AttentionBackend], spec: LayerSpec) -> bool:
    stored = spec.resolved_kv_cache_dtype
    names = {spec.kv_cache_dtype, stored, "auto" if stored == spec.dtype else stored}
    offered = {
        kv_cache_dtype_name(each, "supported_kv_cache_dtypes") for each in backend.supported_kv_cache_dtypes
    }
    if "fp8" in offered:
        offered.add("fp8_e4m3")
    return bool(names & offered)


def _kinds(backend: type[AttentionBackend], spec: LayerSpec) -> Iterator[Reason]:
    """The features that a method of the backend declares."""
    for flag in Feature:
        if flag.ask.declared_by in (None, "supports_attn_type"):
            continue
        declared, asked = getattr(backend, str(flag.ask.declared_by))(), flag.is_asked_by(spec)
        if asked and not declared:
            yield Reason(flag.refusal, code=flag.code, field=flag.ask.field)
        elif flag.ask.only and declared and not asked:
            yield Reason(flag.ask.only, code=flag.code, field=flag.ask.field)


def _device(backend: type[AttentionBackend], device: Device) -> Iterator[Reason]:
    if device.type not in backend.device_types:
        yield Reason(
            "device type not supported",
            code="device_type",
            field="device.type",
            requested=device.type,
            supported=backend.device_types,
        )
    elif device.capability is not None:
        if not backend.supports_compute_capability(device.capability):
            yield Reason(
                "compute capability not supported",
                code="compute_capability",
                field="device.capability",
                requested="{}.{}".format(*device.capability),
            )
    elif device.type in ("cuda", "rocm") and backend.depends_on_capability:
        yield Reason(
            "compute capability not known",
            code="compute_capability",
            field="device.capability",
            remedy=f"name the device with one, such as {'sm90' if device.type == 'cuda' else 'rocm:9.4'}",
        )


def _roles(backend: type[AttentionBackend], spec: LayerSpec, phase: Phase | None) -> Iterator[Reason]:
    if not backend.supports_attn_type(spec.attn_type):
        supported = [kind for kind in AttentionType if backend.supports_attn_type(kind)]
        yield Reason(
            "attention type not supported",
            code="attn_type",
            field="attn_type",
            requested=str(spec.attn_type),
            supported=supported,
        )
    phases = [str(item) for item in backend.supported_phases]
    missing = [each for each in _phases(phase) if each not in phases]
    if missing:
        yield Reason(
            "phase not supported",
            code="phase",
            field="phase",
            requested=missing,
            supported=phases,
            remedy="select per phase" if phase is None and phases else None,
        )


def _phases(phase: Phase | None) -> tuple[str, ...]:
    return ("decode", "prefill") if phase is None else (str(phase),)


def _combination(backend: type[AttentionBackend], spec: LayerSpec, device: Device) -> Iterator[Reason]:
    why = backend.supports_combination(spec, device)
    if why:
        yield Reason(f"combination not supported: {why}", code="combination")


def _features(backend: type[AttentionBackend], spec: LayerSpec) -> Iterator[Reason]:
    """The features that `features` alone declares; each of the others has given its reason before."""
    for flag in spec.required_features() & ~backend.features:
        if flag.ask.declared_by is not None:
            continue
        if flag is Feature.FP8_KV and not _stores(backend, spec):
            continue
        if flag is Feature.NON_CAUSAL and not backend.supports_attn_type(spec.attn_type):
            continue
        yield Reason(flag.refusal, code=flag.code, field=flag.ask.field)
