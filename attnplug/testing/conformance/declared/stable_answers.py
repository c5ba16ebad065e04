"""The answers of a backend depend on the layer alone: not on earlier questions, other objects or processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager

from attnplug.core.backend import AttentionBackend
from attnplug.core.blocks import MultipleOf
from attnplug.core.impl import AttentionImpl
from attnplug.core.interface.interface import backend_faults, builder_faults, impl_faults
from attnplug.core.metadata import AttentionMetadataBuilder
from attnplug.core.sparse import SPARSE_KINDS
from attnplug.core.spec import LayerSpec
from attnplug.testing.conformance.cases.spec_grid import devices, grid
from attnplug.testing.conformance.check import Check, CheckTable, ConformanceError, checks_from, error_context
from attnplug.testing.conformance.declared.refusals import reasons_for
from attnplug.testing.conformance.target import Target

_NO_DTYPE, _NO_STORAGE = "float64", "unheard_of_3bit"


def checks(target: Target) -> Iterator[Check]:
    """The checks of answers; none needs a device."""
    return checks_from(_CHECKS, "declaration", target)


def _check_order(target: Target) -> None:
    """Ask for each layer, then in the opposite order for equal ones that are new objects."""
    layers = grid(target)
    first = {what: _answers(target, what, spec.replace()) for what, spec in layers.items()}
    for what in reversed(layers):
        again = _answers(target, what, layers[what].replace())
        if again != first[what]:
            raise ConformanceError(
                f"validate_configuration for a layer with {what} gave {_words(first[what])}, and for an equal layer "
                f"after other questions {_words(again)}; the answer must depend on the layer alone"
            )


def _answers(target: Target, what: str, spec: LayerSpec) -> list[str]:
    return [str(reason) for reason in reasons_for(target, spec, f"a layer with {what}")]


def _words(reasons: list[str]) -> str:
    return "; ".join(reasons) or "no reason"


def _check_unmodified(target: Target) -> None:
    backend = target.backend
    for what, spec in grid(target).items():
        before = _fields(spec)
        with error_context(f"the declaring methods, for a layer with {what}"):
            backend.validate_configuration(spec, target.device)
            backend.supports_combination(spec, target.device)
            backend.get_priority(spec, target.device, None)
            backend.get_step_priorities(spec, target.device)
            backend.compile_key(spec)
            backend.get_supported_kernel_block_sizes(spec, target.device)
        for name, value in _fields(spec).items():
            if value != before[name]:
                found = f"{before[name]!r} became {value!r}"
                raise ConformanceError(f"a declaring method modified {name} of a layer with {what}: {found}")


def _fields(spec: LayerSpec) -> dict[str, object]:
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}


def _check_claims(target: Target) -> None:
    backend = target.backend
    for call, given, declared in (
        ("supports_dtype", _NO_DTYPE, "supported_dtypes"),
        ("supports_kv_cache_dtype", _NO_STORAGE, "supported_kv_cache_dtypes"),
    ):
        with error_context(f"{call}({given!r})"):
            found: object = getattr(backend, call)(given)
        if found:
            raise ConformanceError(f"{call}({given!r}) is {found!r}, but {declared} does not have it")
    if wrong := [kind for kind in backend.supported_sparse_kinds if kind not in SPARSE_KINDS]:
        known = ", ".join(SPARSE_KINDS)
        raise ConformanceError(f"supported_sparse_kinds has {', '.join(map(repr, wrong))}; known are {known}")
    for device in devices(target):
        if device.capability is not None:
            with error_context(f"supports_compute_capability({device.capability})"):
                answer: object = backend.supports_compute_capability(device.capability)
            if type(answer) is not bool:
                raise ConformanceError(
                    f"supports_compute_capability({device.capability}) is {answer!r}; it must be True or False"
                )
    with error_context("watch_compiling()"):
        watch: object = backend.watch_compiling()
        if not isinstance(watch, AbstractContextManager):
            raise ConformanceError(
                f"watch_compiling() gave {watch!r}; it must give a context manager of a list"
            )
        with watch as names:
            if not isinstance(names, list):
                raise ConformanceError(
                    f"the context of watch_compiling() gave {names!r}; it must give a list"
                )


def _check_sizes(target: Target) -> None:
    backend = target.backend
    with error_context("get_supported_kernel_block_sizes()"):
        union = backend.get_supported_kernel_block_sizes()
    for what, spec in grid(target, pairs=False).items():
        if spec.direct_kv or spec.block_size is not None or target.reasons(spec):
            continue
        with error_context(f"the block sizes of a layer with {what}"):
            own = backend.get_supported_kernel_block_sizes(spec, target.device)
            preferred: object = backend.get_preferred_block_size(spec, target.device)
        for size in (*range(1, 129), 256, 512, 1024):
            if MultipleOf.allows(own, size) and not MultipleOf.allows(union, size):
                raise ConformanceError(
                    f"block size {size} is supported for a layer with {what}, but is not in the union of all specs, "
                    f"which get_supported_kernel_block_sizes returns without arguments: {', '.join(map(str, union))}"
                )
        if type(preferred) is not int or not MultipleOf.allows(own, preferred):
            raise ConformanceError(
                f"get_preferred_block_size for a layer with {what} is {preferred!r}; "
                f"supported for it are {', '.join(map(str, own))}"
            )


def _check_interface(target: Target) -> None:
    backend = target.backend
    faults = list(backend_faults(backend, AttentionBackend))
    with error_context("get_impl_cls and get_builder_cls"):
        impl, builder = backend.get_impl_cls(), backend.get_builder_cls()
    if isinstance(impl, type) and issubclass(impl, AttentionImpl):
        faults += impl_faults(impl, AttentionImpl)
    if isinstance(builder, type) and issubclass(builder, AttentionMetadataBuilder):
        faults += builder_faults(builder, AttentionMetadataBuilder)
    if faults:
        raise ConformanceError("; ".join(faults))


_CHECKS: CheckTable = {
    "order-of-questions": (
        _check_order,
        "validate_configuration gives equal layers the same answer, in any order",
    ),
    "layers-unmodified": (
        _check_unmodified,
        "declaring methods do not modify the layer that they are asked about",
    ),
    "claims": (
        _check_claims,
        "supports_ methods claim no more than the lists, and watch_compiling gives a context",
    ),
    "layer-block-sizes": (
        _check_sizes,
        "block sizes of each layer are in the union, and it prefers one of its own",
    ),
    "interface": (_check_interface, "everything that the classes write is read by attnplug"),
}
