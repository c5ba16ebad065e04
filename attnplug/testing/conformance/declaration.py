"""A backend declares values that mean something, agree with each other, and stay the same."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from attnplug.core.composite import CompositeBackend
from attnplug.core.device import Device
from attnplug.core.dtypes import DTYPES, bare_dtype_name, element_size, kv_cache_dtype_name
from attnplug.core.errors import SpecError
from attnplug.core.features import Feature
from attnplug.core.spec import AttentionType, Phase
from attnplug.testing.conformance.check import Check, ConformanceError
from attnplug.testing.conformance.spec_grid import PHASES, grid
from attnplug.testing.conformance.target import Target
from attnplug.testing.conformance.verdicts import during

__all__ = ["checks"]

_NAME = r"[A-Za-z][A-Za-z0-9_.-]*"


def checks(target: Target) -> Iterator[Check]:
    """One check for each thing that a backend declares; none needs a device."""
    for name, (run, summary) in _CHECKS.items():
        yield Check(f"declaration/{name}", functools.partial(run, target), summary)


def _check_name(target: Target) -> None:
    with during("get_name()"):
        name: object = target.backend.get_name()
    family: object = target.backend.family
    # Only composites, which are attnplug's own, have two names.
    pattern = rf"{_NAME}\+{_NAME}" if issubclass(target.backend, CompositeBackend) else _NAME
    if not isinstance(name, str) or not re.fullmatch(pattern, name):
        raise ConformanceError(
            f"get_name() is {name!r}; a name has letters, digits and _ . - and begins with a letter"
        )
    if family is not None and not (isinstance(family, str) and re.fullmatch(_NAME, family)):
        raise ConformanceError(f"family is {family!r}; it must be None or a name")


def _check_requires(target: Target) -> None:
    for entry in _sequence(target, "requires"):
        for each in entry if isinstance(entry, tuple) else (entry,):
            try:
                Requirement(each)
            except (InvalidRequirement, TypeError):
                raise ConformanceError(
                    f"requires has {each!r}; it must be a PEP 508 requirement, as 'triton>=3.4'"
                ) from None


def _check_device_types(target: Target) -> None:
    types = _sequence(target, "device_types", least=1)
    for each in types:
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
        try:
            element_size("float32" if name == "auto" else name)
        except SpecError as problem:
            raise ConformanceError(f"{field} has {name!r}: its pages cannot be sized: {problem}") from None
    fp8 = [name for name in names if name.startswith("fp8")]
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
        with during(f"{method}()"):
            said: object = getattr(backend, method)()
        declared = flag in backend.features
        if said is not declared:
            has = "has" if declared else "lacks"
            raise ConformanceError(f"{method}() is {said!r}, but features {has} {flag.name}")
    for flag, kinds in (
        (Feature.ENCODER, (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)),
        (Feature.CROSS, (AttentionType.ENCODER_DECODER,)),
    ):
        with during("supports_attn_type"):
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
            with during(f"get_priority for a layer with {what}"):
                priority: object = target.backend.get_priority(spec, target.device, phase)
            if type(priority) is not int or not 0 <= priority <= 999:
                raise ConformanceError(f"get_priority is {priority!r}; it must be an integer from 0 to 999")


def _check_options(target: Target) -> None:
    options: Any = target.backend.Options
    if options is None:
        return
    if not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        raise ConformanceError(f"Options is {options!r}; it must be None or a frozen dataclass")
    if not options.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise ConformanceError(f"{options.__qualname__} is not frozen: write @dataclass(frozen=True)")
    with during(f"{options.__qualname__}(), made without arguments as it is where the user sets no option"):
        hash(options())
    with during(f"reading the annotations of {options.__qualname__}"):
        typing.get_type_hints(options)


_CHECKS: dict[str, tuple[Callable[[Target], None], str]] = {
    "name": (_check_name, "get_name gives a name that a user can type"),
    "requires": (_check_requires, "requires holds requirements that can be read"),
    "device-types": (_check_device_types, "device_types names types of devices"),
    "phases": (_check_phases, "supported_phases names phases"),
    "dtypes": (_check_dtypes, "supported_dtypes names dtypes of a LayerSpec"),
    "kv-cache-dtypes": (
        _check_kv_cache_dtypes,
        "supported_kv_cache_dtypes can be stored, and agree with FP8_KV",
    ),
    "features": (_check_features, "what methods say of features, features says too"),
    "priority": (_check_priority, "get_priority is an integer from 0 to 999"),
    "options": (_check_options, "Options is a frozen dataclass with defaults, or None"),
}
