"""Variants of TORCH, and what checks say about them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, Device
from attnplug.testing.conformance.cases.cases import Case
from attnplug.testing.conformance.cases.designed_cases import designed_cases
from attnplug.testing.conformance.check import Check, CheckSkipped, Level
from attnplug.testing.conformance.target import Target

__all__ = ["failures", "torch_cases", "variant"]


def torch_cases(level: Level = Level.SMOKE) -> list[Case]:
    """The numeric cases of TORCH, which are those of all variants with its declarations; searched for once."""
    return _torch_cases(level)


@functools.cache
def _torch_cases(level: Level) -> list[Case]:
    return designed_cases(Target(TorchBackend, Device("cpu"), level))


def variant(
    name: str,
    *,
    impl: type[AttentionImpl[Any]] | None = None,
    builder: type[AttentionMetadataBuilder[Any]] | None = None,
    base: type[AttentionBackend] = TorchBackend,
    **overrides: Any,
) -> type[AttentionBackend]:
    """TORCH under another name, with other parts or class attributes; functions are made class methods."""
    methods: Mapping[str, Any] = {
        "get_name": staticmethod(lambda: name),
        **({"get_impl_cls": classmethod(lambda cls: impl)} if impl else {}),
        **({"get_builder_cls": classmethod(lambda cls: builder)} if builder else {}),
        **{
            key: classmethod(value) if callable(value) and not isinstance(value, type) else value
            for key, value in overrides.items()
        },
    }
    return type(name, (base,), dict(methods))


def failures(
    backend: type[AttentionBackend],
    group: Callable[[Target], Iterator[Check]],
    level: Level = Level.SMOKE,
    device: str = "cpu",
) -> dict[str, BaseException]:
    """What each failing check of one group raises, by check id."""
    found: dict[str, BaseException] = {}
    for check in group(Target(backend, Device.parse(device), level)):
        try:
            check()
        except CheckSkipped:
            continue
        except Exception as problem:
            found[check.id] = problem
    return found
