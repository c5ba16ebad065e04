"""Everything that a backend declares, as plain values; needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from attnplug.core.backend import AttentionBackend
from attnplug.core.device import Device
from attnplug.core.spec import AttentionType, LayerSpec, Phase

__all__ = ["declarations"]

_ATTRIBUTES = (
    *("family", "requires", "device_types", "supported_dtypes", "supported_kv_cache_dtypes"),
    *("supported_phases", "features", "step_safe"),
)
_METHODS = (
    *("get_name", "get_supported_head_sizes", "get_supported_kernel_block_sizes", "get_preferred_block_size"),
    *("is_mla", "is_sparse", "supports_sink", "supports_mm_prefix", "supported_kv_cache_layouts"),
    "get_required_kv_cache_layout",
)


def declarations(
    backend: type[AttentionBackend], asked: Iterable[tuple[LayerSpec, Device]]
) -> dict[str, list[Any]]:
    """What each attribute and method says, by its name; of those asked about a layer, for each in turn."""
    found: dict[str, list[Any]] = {name: [_plain(getattr(backend, name))] for name in _ATTRIBUTES}
    found |= {f"{name}()": [_plain(getattr(backend, name)())] for name in _METHODS}
    found["supports_attn_type"] = [bool(backend.supports_attn_type(kind)) for kind in AttentionType]
    per_layer: dict[str, Callable[[LayerSpec, Device], Any]] = {
        "validate_configuration": lambda spec, device: [str(each) for each in _all(backend, spec, device)],
        "get_priority": lambda spec, device: [
            backend.get_priority(spec, device, phase) for phase in (None, *Phase)
        ],
        "supports_combination": backend.supports_combination,
        "supports_head_size": lambda spec, device: backend.supports_head_size(spec.head_size),
        "get_supported_kernel_block_sizes": backend.get_supported_kernel_block_sizes,
        "get_preferred_block_size": backend.get_preferred_block_size,
        "compile_key": lambda spec, device: backend.compile_key(spec),
        "get_kv_cache_stride_order": lambda spec, device: [
            backend.get_kv_cache_stride_order(layers, layout=layout, spec=spec)
            for layers in (False, True)
            for layout in backend.supported_kv_cache_layouts()
        ],
        "get_kv_cache_shape": lambda spec, device: backend.get_kv_cache_shape(
            4, 16, spec.num_kv_heads, spec.head_size, spec.kv_cache_dtype, spec.head_size_v
        ),
    }
    layers = list(asked)
    for name, ask in per_layer.items():
        found[name] = [_plain(ask(spec, device)) for spec, device in layers]
    return found


def _all(backend: type[AttentionBackend], spec: LayerSpec, device: Device) -> list[Any]:
    return [each for phase in (None, *Phase) for each in backend.validate_configuration(spec, device, phase)]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (tuple, list)) else value
