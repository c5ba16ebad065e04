"""The attributes and sizes that a backend declares are valid and agree with each other.

Declarations do not change between calls, and get_impl_cls and get_builder_cls return complete classes.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from attnplug.core.blocks import MultipleOf
from attnplug.core.composite import CompositeBackend
from attnplug.core.device import Device
from attnplug.core.dtypes import DTYPES, bare_dtype_name, element_size, kv_cache_dtype_name
from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.impl import AttentionImpl, MLAAttentionImpl
from attnplug.core.interface.answers import HookError, answer, serving_class
from attnplug.core.kv_format import CODEC, kv_format
from attnplug.core.metadata import AttentionCGSupport, AttentionMetadataBuilder
from attnplug.core.spec import AttentionType, Phase
from attnplug.testing.conformance.cases.spec_grid import PHASES, grid, plainest
from attnplug.testing.conformance.check import Check, CheckTable, ConformanceError, checks_from, error_context
from attnplug.testing.conformance.process.lightness_child import declarations
from attnplug.testing.conformance.target import Target

_NAME = r"[A-Za-z][A-Za-z0-9_.-]*"
_SIZES = (1, 7, 16, 64, 80, 96, 128, 192, 256, 576, 1009)


def checks(target: Target) -> Iterator[Check]:
    """One check for each attribute or kind of size; none needs a device."""
    return checks_from(_CHECKS, "declaration", target)


def _check_name(target: Target) -> None:
    with error_context("get_name()"):
        name: object = target.backend.get_name()
    family: object = target.backend.family
    # Only attnplug's own composites have a name of several parts.
    pattern = rf"{_NAME}(\+{_NAME})+" if issubclass(target.backend, CompositeBackend) else _NAME
    if not isinstance(name, str) or not re.fullmatch(pattern, name):
        raise ConformanceError(
            f"get_name() is {name!r}; a name has letters, digits and _ . - and begins with a letter"
        )
    if family is not None and not (isinstance(family, str) and re.fullmatch(_NAME, family)):
        raise ConformanceError(f"family is {family!r}; it must be None or a name")


def _check_requires(target: Target) -> None:
    # Each worker imports this module, and packaging takes as long as a third of it.
    from packaging.requirements import InvalidRequirement, Requirement

    for entry in _sequence(target, "requires"):
        for each in entry if isinstance(entry, tuple) else (entry,):
            try:
                Requirement(each)
            except (InvalidRequirement, TypeError):
                raise ConformanceError(
                    f"requires has {each!r}; it must be a PEP 508 requirement, such as 'triton>=3.4,<4'"
                ) from None


def _check_device_types(target: Target) -> None:
    for each in _sequence(target, "device_types", least=1):
        try:
            Device(each)
        except SpecError as problem:
            raise ConformanceError(f"device_types has {each!r}: {problem}") from None


def _check_phases(target: Target) -> None:
    phases = [str(each) for each in _sequence(target, "supported_phases", least=1)]
    _expect_known("supported_phases", phases, list(Phase))


def _check_dtypes(target: Target) -> None:
    names = [
        _named(bare_dtype_name, each, "supported_dtypes") for each in _sequence(target, "supported_dtypes", 1)
    ]
    _expect_known("supported_dtypes", names, DTYPES)


def _check_kv_cache_dtypes(target: Target) -> None:
    field = "supported_kv_cache_dtypes"
    names = [_named(kv_cache_dtype_name, each, field) for each in _sequence(target, field, 1)]
    for name in names:
        if name in (CODEC, "auto") or kv_format(name).planes:
            continue
        try:
            element_size(name)
        except SpecError as problem:
            raise ConformanceError(f"{field} has {name!r}: its pages cannot be sized: {problem}") from None
    fp8 = [name for name in names if kv_format(name).feature == "fp8_kv"]
    if fp8 and Feature.FP8_KV not in target.backend.features:
        raise ConformanceError(
            f"{field} has {', '.join(fp8)}, but features lacks FP8_KV: no layer could use it"
        )
    if not fp8 and Feature.FP8_KV in target.backend.features:
        raise ConformanceError(f"features has FP8_KV, but {field} names no fp8 type: {', '.join(names)}")


def _named(read: Callable[[object, str], str], value: object, field: str) -> str:
    try:
        return read(value, field)
    except SpecError as problem:
        raise ConformanceError(str(problem)) from None


def _expect_known(field: str, names: Sequence[str], known: Sequence[str]) -> None:
    if wrong := [name for name in names if name not in known]:
        raise ConformanceError(f"{field} has {', '.join(map(repr, wrong))}; known are {', '.join(known)}")


def _sequence(target: Target, field: str, least: int = 0) -> Sequence[Any]:
    found = getattr(target.backend, field)
    if isinstance(found, str) or not isinstance(found, Sequence) or len(found) < least:
        what = "a list or tuple" if least == 0 else f"a list or tuple of at least {least}"
        raise ConformanceError(f"{field} is {found!r}; it must be {what}")
    return found


def _check_features(target: Target) -> None:
    backend = target.backend
    if not isinstance(backend.features, Feature):
        raise ConformanceError(f"features is {backend.features!r}; it must be a Feature flag set")
    for flag, method in (
        (Feature.MLA, "is_mla"),
        (Feature.SPARSE, "is_sparse"),
        (Feature.SINKS, "supports_sink"),
        (Feature.MM_PREFIX, "supports_mm_prefix"),
    ):
        with error_context(f"{method}()"):
            found: object = getattr(backend, method)()
        declared = flag in backend.features
        if found is not declared:
            has = "has" if declared else "lacks"
            raise ConformanceError(f"{method}() is {found!r}, but features {has} {flag.name}")
    for flag, kinds in (
        (Feature.ENCODER, (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)),
        (Feature.CROSS, (AttentionType.ENCODER_DECODER,)),
    ):
        with error_context("supports_attn_type"):
            served = [str(kind) for kind in kinds if backend.supports_attn_type(kind)]
        if served and flag not in backend.features:
            raise ConformanceError(
                f"supports_attn_type says {', '.join(served)}, but features lacks {flag.name}"
            )
        if not served and flag in backend.features:
            raise ConformanceError(
                f"features has {flag.name}, but supports_attn_type refuses {', '.join(kinds)}"
            )


def _check_priority(target: Target) -> None:
    for what, spec in grid(target, pairs=False).items():
        for phase in PHASES:
            with error_context(f"get_priority for a layer with {what}"):
                priority: object = target.backend.get_priority(spec, target.device, phase)
            if type(priority) is not int or not 0 <= priority <= 999:
                raise ConformanceError(f"get_priority is {priority!r}; it must be an integer from 0 to 999")


def _check_step_priorities(target: Target) -> None:
    for what, spec in grid(target, pairs=False).items():
        with error_context(f"get_step_priorities for a layer with {what}"):
            # It checks the types, and StepPriority its own values.
            answer(target.backend, "get_step_priorities", spec, target.device)


def _check_options(target: Target) -> None:
    options: Any = target.backend.Options
    if options is None:
        return
    if not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        raise ConformanceError(f"Options is {options!r}; it must be None or a frozen dataclass")
    if not options.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise ConformanceError(f"{options.__qualname__} is not frozen: write @dataclass(frozen=True)")
    with error_context(f"{options.__qualname__}(), made without arguments, as if the user sets no option"):
        hash(options())
    with error_context(f"reading the annotations of {options.__qualname__}"):
        typing.get_type_hints(options)


def _check_head_sizes(target: Target) -> None:
    backend = target.backend
    with error_context("get_supported_head_sizes()"):
        sizes = backend.get_supported_head_sizes()
    _expect_sizes("get_supported_head_sizes()", sizes)
    for size in dict.fromkeys([*_SIZES, *(each for each in sizes if isinstance(each, int))]):
        listed = not sizes or MultipleOf.allows(sizes, size)
        with error_context(f"supports_head_size({size})"):
            served: object = backend.supports_head_size(size)
        if served is not listed:
            problem = f"is {served!r}, but get_supported_head_sizes() gives {listed}"
            raise ConformanceError(f"supports_head_size({size}) {problem}: {_words(sizes)}")


def _check_block_sizes(target: Target) -> None:
    backend, spec = target.backend, plainest(target)
    with error_context("get_supported_kernel_block_sizes()"):
        union = backend.get_supported_kernel_block_sizes()
        own = backend.get_supported_kernel_block_sizes(spec, target.device)
    for what, sizes in (("()", union), ("(spec, device)", own)):
        _expect_sizes(f"get_supported_kernel_block_sizes{what}", sizes)
        if not sizes:
            raise ConformanceError(f"get_supported_kernel_block_sizes{what} names no size")
    for size in (*range(1, 257), 512, 1024):
        if MultipleOf.allows(own, size) and not MultipleOf.allows(union, size):
            raise ConformanceError(
                f"block size {size} is supported for a plain layer, but is not in the union of all specs, "
                f"which the method returns without arguments: {_words(union)}"
            )


def _check_preferred_block_size(target: Target) -> None:
    backend, spec = target.backend, plainest(target)
    for layer, device in ((None, None), (spec, target.device)):
        with error_context("get_supported_kernel_block_sizes"):
            allowed = backend.get_supported_kernel_block_sizes(layer, device)
        for default in (16, 1, 7, 17, 64, 100, 5000):
            call = f"get_preferred_block_size({'spec, device, ' if layer else ''}default={default})"
            with error_context(call):
                size: object = backend.get_preferred_block_size(layer, device, default)
            if type(size) is not int or not MultipleOf.allows(allowed, size):
                raise ConformanceError(f"{call} is {size!r}; supported are {_words(allowed)}")


def _expect_sizes(what: str, sizes: object) -> None:
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise ConformanceError(f"{what} is {sizes!r}; it must be a sequence of sizes")
    for size in sizes:
        if not isinstance(size, MultipleOf) and (type(size) is not int or size < 1):
            raise ConformanceError(
                f"{what} has {size!r}; a size is an integer of at least 1, or MultipleOf(n)"
            )


def _words(sizes: Sequence[int | MultipleOf]) -> str:
    return ", ".join(map(str, sizes)) or "any size"


_CHECKS: CheckTable = {
    "name": (_check_name, "get_name returns a name that a user can type"),
    "requires": (_check_requires, "requires contains PEP 508 requirements"),
    "device-types": (_check_device_types, "device_types contains types of devices"),
    "phases": (_check_phases, "supported_phases contains phases"),
    "dtypes": (_check_dtypes, "supported_dtypes contains dtypes of a LayerSpec"),
    "kv-cache-dtypes": (
        _check_kv_cache_dtypes,
        "supported_kv_cache_dtypes can be stored and agree with FP8_KV",
    ),
    "features": (_check_features, "methods such as supports_sink agree with features"),
    "priority": (_check_priority, "get_priority is an integer from 0 to 999"),
    "step-priorities": (_check_step_priorities, "get_step_priorities is a sequence of StepPriority"),
    "options": (_check_options, "Options is a frozen dataclass with defaults, or None"),
    "head-sizes": (_check_head_sizes, "head sizes are sizes, and supports_head_size agrees"),
    "block-sizes": (_check_block_sizes, "block sizes are sizes, and those of a layer are in the union"),
    "preferred-block-size": (_check_preferred_block_size, "the preferred block size is a supported one"),
}


HOST_LENGTHS = ("none", "upper_bound", "exact")
"""Values of needs_host_seq_lens, the least demanding first."""


def interface_checks(target: Target) -> Iterator[Check]:
    """The interface_checks of the impl and builder classes, and of repeated calls."""
    return checks_from(_INTERFACE_CHECKS, "declaration", target)


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


def _check_for_layer(target: Target) -> None:
    for what, spec in grid(target, pairs=False).items():
        try:
            serving_class(target.backend, spec)
        except HookError as problem:
            raise ConformanceError(f"for a layer with {what}: {problem}") from problem


_INTERFACE_CHECKS: CheckTable = {
    "impl-class": (_check_impl_class, "get_impl_cls returns an AttentionImpl without abstract methods"),
    "builder-class": (_check_builder_class, "get_builder_cls returns a builder without abstract methods"),
    "stable": (_check_stable, "declarations do not change between calls"),
    "compile-key": (_check_compile_key, "compile_key returns hashable keys"),
    "for-layer": (
        _check_for_layer,
        "for_layer returns classes of the same plugin and name, the same each time",
    ),
}
