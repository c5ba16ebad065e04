"""What a backend says does not change, and its doors lead to parts of the right kinds."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from attnplug.core.impl import AttentionImpl, MLAAttentionImpl
from attnplug.core.metadata import AttentionCGSupport, AttentionMetadataBuilder
from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.conformance.declarations import declarations
from attnplug.testing.conformance.spec_grid import grid
from attnplug.testing.conformance.target import Target
from attnplug.testing.conformance.verdicts import during

__all__ = ["checks"]

_HOST_LENGTHS = ("none", "upper_bound", "exact")


def checks(target: Target) -> Iterator[Check]:
    """The checks of doors and of repeated questions."""
    for name, (run, summary) in _CHECKS.items():
        yield Check(f"declaration/{name}", functools.partial(run, target), summary)


def _check_impl_door(target: Target) -> None:
    base: type[Any] = MLAAttentionImpl if target.backend.is_mla() else AttentionImpl
    _check_door("get_impl_cls", target.backend.get_impl_cls, base)


def _check_builder_door(target: Target) -> None:
    builder = _check_door("get_builder_cls", target.backend.get_builder_cls, AttentionMetadataBuilder)
    if builder.needs_host_seq_lens not in _HOST_LENGTHS:
        limit = f"must be one of {', '.join(_HOST_LENGTHS)}"
        raise ConformanceError(
            f"{builder.__name__}.needs_host_seq_lens={builder.needs_host_seq_lens!r} {limit}"
        )
    if not isinstance(builder.cudagraph_support, AttentionCGSupport):
        limit = f"must be one of {', '.join(AttentionCGSupport.__members__)} of AttentionCGSupport"
        raise ConformanceError(f"{builder.__name__}.cudagraph_support={builder.cudagraph_support!r} {limit}")
    if type(builder.supports_update_block_table) is not bool:
        found = builder.supports_update_block_table
        raise ConformanceError(
            f"{builder.__name__}.supports_update_block_table={found!r} must be True or False"
        )


def _check_door(name: str, door: Callable[[], object], base: type[Any]) -> Any:
    with during(f"{name}()"):
        part, again = door(), door()
    if not (isinstance(part, type) and issubclass(part, base)):
        raise ConformanceError(f"{name}() gives {part!r}; it must be a subclass of {base.__name__}")
    if inspect.isabstract(part):
        missing = ", ".join(sorted(getattr(part, "__abstractmethods__", ())))
        raise ConformanceError(f"{name}() gives {part.__name__}, which lacks {missing}")
    if part is not again:
        raise ConformanceError(f"{name}() gives another class at each call: {part!r} and {again!r}")
    return part


def _check_stable(target: Target) -> None:
    asked = [(spec, target.device) for spec in grid(target, pairs=False).values()]
    with during("asking the backend for all that it declares"):
        first, *others = (declarations(target.backend, asked) for _ in range(3))
    for other in others:
        for name, value in other.items():
            if value != first[name]:
                raise ConformanceError(_changed(name, first[name], value))


def _changed(name: str, one: list[Any], other: list[Any]) -> str:
    was, became = next((a, b) for a, b in zip(one, other, strict=True) if a != b)
    return f"{name} changed between two calls: {was!r} became {became!r}"


def _check_compile_key(target: Target) -> None:
    for what, spec in grid(target, pairs=False).items():
        with during(f"compile_key for a layer with {what}, which must be hashable or None"):
            hash(target.backend.compile_key(spec))


_CHECKS: dict[str, tuple[Callable[[Target], None], str]] = {
    "impl-class": (_check_impl_door, "get_impl_cls leads to an AttentionImpl that can be made"),
    "builder-class": (_check_builder_door, "get_builder_cls leads to a builder that can be made"),
    "stable": (_check_stable, "what a backend declares does not change between calls"),
    "compile-key": (_check_compile_key, "compile_key gives keys that can be kept in a set"),
}
