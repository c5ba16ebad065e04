"""Classes of backends as values that can be pickled: those that attnplug makes of two are in no module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from attnplug.core.composite.backend import CompositeBackend, composite_backend
from attnplug.core.interface.signatures import is_found
from attnplug.core.mla_backend import MLADecodeBackend

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend

Reference: TypeAlias = Any
"""A class of a module, or a tuple of the kind of pair and the references of its prefill and its decode."""


def reference_of(backend: type[AttentionBackend]) -> Reference | None:
    """The reference of a class; None for one that no other process finds, such as one made in a function."""
    if is_found(backend):
        return backend
    if issubclass(backend, CompositeBackend):
        return _pair("composite", backend.prefill, backend.decode)
    decodes = vars(backend).get("_decodes")
    if issubclass(backend, MLADecodeBackend) and decodes is not None and backend.prefill is not None:
        return _pair("latent", backend.prefill, decodes)
    return None


def _pair(kind: str, prefill: type[AttentionBackend], decode: type[AttentionBackend]) -> Reference | None:
    halves = reference_of(prefill), reference_of(decode)
    return None if None in halves else (kind, *halves)


def class_of(reference: Reference | None) -> type[AttentionBackend] | None:
    """The class of a reference."""
    if not isinstance(reference, tuple):
        return reference
    kind, prefill, decode = (reference[0], *map(class_of, reference[1:]))
    if prefill is None or decode is None:
        return None
    if kind == "latent" and issubclass(decode, MLADecodeBackend):
        return decode.with_prefill(prefill)
    return composite_backend(prefill, decode)
