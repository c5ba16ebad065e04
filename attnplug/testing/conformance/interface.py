"""Declarations do not change between calls, and get_impl_cls and get_builder_cls return complete classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from attnplug.core.impl import AttentionImpl, MLAAttentionImpl
from attnplug.core.metadata import AttentionCGSupport, AttentionMetadataBuilder
from attnplug.testing.conformance.check import Check, CheckTable, ConformanceError, checks_from, error_context
from attnplug.testing.conformance.lightness_child import declarations
from attnplug.testing.conformance.spec_grid import grid
from attnplug.testing.conformance.target import Target

HOST_LENGTHS = ("none", "upper_bound", "exact")
"""Values of needs_host_seq_lens, the least demanding first."""


def checks(target: Target) -> Iterator[Check]:
    """The checks of the impl and builder classes, and of repeated calls."""
    return checks_from(_CHECKS, "declaration", target)


def _check_impl_class(target: Target) -> None:
    base: type[Any] = MLAAttentionImpl if target.backend.is_mla() else AttentionImpl
    _part_class("get_impl_cls", target.backend.get_impl_cls, base)


def _check_builder_class(target: Target) -> None:
    builder = _part_class("get_builder_cls", target.backend.get_builder_cls, AttentionMetadataBuilder)
    if builder.needs_host_seq_lens not in HOST_LENGTHS:
        limit = f"must be one of {', '.join(HOST_LENGTHS)}"
        raise ConformanceError(
            f"{builder.__name__}.needs_host_seq_lens={builder.needs_host_seq_lens!r} {limit}"
        )
    if not isinstance(builder.cudagraph_support, AttentionCGSupport):
        limit = f"must be one of {', '.join(AttentionCGSupport.__members__)} of AttentionCGSupport"
        raise ConformanceError(f"{builder.__name__}.cudagraph_support={builder.cudagraph_support!r} {limit}")
    if type(builder.supports_update_block_table) is not bool:
        found = f"{builder.__name__}.supports_update_block_table={builder.supports_update_block_table!r}"
        raise ConformanceError(f"{found} must be True or False")


def _part_class(name: str, method: Callable[[], object], base: type[Any]) -> Any:
    with error_context(f"{name}()"):
        part, again = method(), method()
    if not (isinstance(part, type) and issubclass(part, base)):
        raise ConformanceError(f"{name}() gives {part!r}; it must be a subclass of {base.__name__}")
    if inspect.isabstract(part):
        missing = ", ".join(sorted(getattr(part, "__abstractmethods__", ())))
        raise ConformanceError(f"{name}() gives {part.__name__}, which lacks {missing}")
    if part is not again:
        raise ConformanceError(f"{name}() gives another class at each call: {part!r} and {again!r}")
    return part


def _check_stable(target: Target) -> None:
    layers = [(spec, target.device) for spec in grid(target, pairs=False).values()]
    with error_context("calling all declaring methods of the backend"):
        first, *others = (declarations(target.backend, layers) for _ in range(3))
    for other in others:
        for name, values in other.items():
            for was, became in zip(first[name], values, strict=True):
                if was != became:
                    raise ConformanceError(f"{name} changed between two calls: {was!r} became {became!r}")


def _check_compile_key(target: Target) -> None:
    for what, spec in grid(target, pairs=False).items():
        with error_context(f"compile_key for a layer with {what}, which must be hashable or None"):
            hash(target.backend.compile_key(spec))


_CHECKS: CheckTable = {
    "impl-class": (_check_impl_class, "get_impl_cls returns an AttentionImpl without abstract methods"),
    "builder-class": (_check_builder_class, "get_builder_cls returns a builder without abstract methods"),
    "stable": (_check_stable, "declarations do not change between calls"),
    "compile-key": (_check_compile_key, "compile_key returns hashable keys"),
}
