"""Backends that declare whatever a test wants, and serve exactly that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from attnplug.core.backend import AttentionBackend
from attnplug.core.features import Feature

__all__ = ["backend_of", "combined"]


def backend_of(
    *,
    head_sizes: Sequence[Any] = (),
    block_sizes: Sequence[Any] | None = None,
    layouts: Sequence[str] = ("NHD", "HND"),
    refuses: Callable[[Any, Any], str | None] | None = None,
    features: Feature | None = None,
    **declared: Any,
) -> type[AttentionBackend]:
    """A backend class for CPUs and GPUs.

    Args:
        head_sizes: what `get_supported_head_sizes` returns.
        block_sizes: what `get_supported_kernel_block_sizes` returns; None for any.
        layouts: what `supported_kv_cache_layouts` returns.
        refuses: `supports_combination`.
        features: as the attribute; None for none.
        declared: other attributes.
    """
    namespace: dict[str, Any] = {
        "device_types": ("cpu", "cuda"),
        "features": features or Feature(0),
        "get_name": staticmethod(lambda: "DESIGNED"),
        "get_impl_cls": classmethod(lambda cls: None),
        "get_builder_cls": classmethod(lambda cls: None),
        "get_supported_head_sizes": classmethod(lambda cls: head_sizes),
        "supported_kv_cache_layouts": classmethod(lambda cls: layouts),
        **declared,
    }
    if block_sizes is not None:
        namespace["get_supported_kernel_block_sizes"] = classmethod(
            lambda cls, spec=None, device=None: block_sizes
        )
    if refuses is not None:
        namespace["supports_combination"] = classmethod(lambda cls, spec, device: refuses(spec, device))
    return type("Designed", (AttentionBackend,), namespace)


def combined(names: Sequence[str]) -> Feature:
    """The flags of these lower-case names."""
    return Feature(sum(Feature[name.upper()].value for name in names))
