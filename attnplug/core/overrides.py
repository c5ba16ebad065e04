"""Which names of the interface a class has replaced; looks only at classes and runs no code of theirs."""

from __future__ import annotations

_INTERFACE = ("attnplug.core.backend", "attnplug.core.impl", "attnplug.core.metadata")
"""The modules of the classes that a plugin subclasses."""


def owner_of(cls: type, name: str) -> type | None:
    """The class whose `name` a `cls` has, itself or one that it inherits from; None without one."""
    return next((each for each in cls.__mro__ if name in vars(each)), None)


def overrides(cls: type, name: str) -> bool:
    """Whether `cls`, or a class or mixin that it inherits from, has its own `name` of the interface."""
    owner = owner_of(cls, name)
    return owner is not None and owner.__module__ not in _INTERFACE
