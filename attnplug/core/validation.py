"""The walk behind AttentionBackend.validate_configuration: every reason, in a fixed order."""

from __future__ import annotations

import inspect
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

__all__ = ["asks_capability", "validate"]

# Reported by checks of their own, so that one cause gives one reason.
_OWN_CHECK = (
    Feature.MLA | Feature.SINKS | Feature.SPARSE | Feature.MM_PREFIX | Feature.CROSS | Feature.ENCODER
)


def validate(
    backend: type[AttentionBackend], spec: LayerSpec, device: Device, phase: Phase | None
) -> list[Reason]:
    """Every reason for which `backend` does not serve `spec`; see `validate_configuration`."""
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
    if spec.mla is not None and not backend.is_mla():
        yield Reason("MLA not supported", code="mla", field="mla")
    elif spec.mla is None and backend.is_mla():
        yield Reason("non-MLA not supported", code="mla", field="mla")
    if spec.has_sinks and not backend.supports_sink():
        yield Reason("sinks not supported", code="sink", field="has_sinks")
    if spec.sparse and not backend.is_sparse():
        yield Reason("sparse attention not supported", code="sparse", field="sparse")
    elif backend.is_sparse() and not spec.sparse:
        yield Reason("non-sparse attention not supported", code="sparse", field="sparse")
    if spec.mm_prefix and not backend.supports_mm_prefix():
        yield Reason("multimodal prefix spans not supported", code="mm_prefix", field="mm_prefix")


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
    elif device.type in ("cuda", "rocm") and asks_capability(backend):
        yield Reason(
            "compute capability not known",
            code="compute_capability",
            field="device.capability",
            remedy=f"name the device with one, as {'sm90' if device.type == 'cuda' else 'rocm:9.4'}",
        )


def asks_capability(backend: type[AttentionBackend]) -> bool:
    """Whether what it serves depends on a GPU's compute capability."""
    from attnplug.core.backend import AttentionBackend

    default = AttentionBackend.__dict__["supports_compute_capability"]
    return inspect.getattr_static(backend, "supports_compute_capability") is not default


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
    missing = spec.required_features() & ~backend.features & ~_OWN_CHECK
    if not missing:
        return
    if not _stores(backend, spec):
        missing &= ~Feature.FP8_KV
    if spec.attn_type is not AttentionType.DECODER and not backend.supports_attn_type(spec.attn_type):
        missing &= ~Feature.NON_CAUSAL
    for name in missing.names():
        yield Reason(f"{name} not supported", code=f"feature.{name}", field=_FIELDS.get(name))


_FIELDS = {
    "sliding_window": "window",
    "chunked_local": "chunk_size",
    "soft_cap": "logits_soft_cap",
    "alibi": "has_alibi",
    "lse": "needs_lse",
    "head_size_v": "head_size_v",
    "non_causal": "causal",
    "direct_kv": "direct_kv",
    "fp8_kv": "kv_cache_dtype",
}
