"""Which names of the interface a class has replaced; looks only at classes and runs no code of theirs."""

from __future__ import annotations

import abc
import sys
from typing import Protocol

from attnplug.core.guarded import class_name, mro_of
from attnplug.core.text import shown

INTERFACE = ("attnplug.core.backend", "attnplug.core.impl", "attnplug.core.metadata")
"""The modules of the classes that a plugin subclasses."""


def owner_of(cls: type, name: str) -> type | None:
    """The class whose `name` a `cls` has, itself or one that it inherits from; None without one."""
    return next((each for each in cls.__mro__ if name in vars(each)), None)


def overrides(cls: type, name: str) -> bool:
    """Whether `cls`, or a class or mixin that it inherits from, has its own `name` of the interface."""
    owner = owner_of(cls, name)
    return owner is not None and owner.__module__ not in INTERFACE


_METHODS_OF_CLASSES = frozenset(
    [
        "__abstractmethods__",
        "__bool__",
        "__class__",
        "__getattr__",
        "__getattribute__",
        "__instancecheck__",
        "__len__",
        "__mro__",
        "__name__",
        "__qualname__",
        "__subclasscheck__",
    ]
)
"""Names of a metaclass with which reading a class would run code of a plugin, or give another class's answer."""


def class_fault(backend: type, base: type) -> str | None:
    """Why a backend class cannot be read, or its module not believed, or None; asks neither.

    Args:
        backend: a subclass of `base`.
        base: AttentionBackend.
    """
    kind = type(backend)
    # Backends are keys of dictionaries, and a selection must give the same answer every time.
    if kind.__hash__ is not type.__hash__ or kind.__eq__ is not type.__eq__:
        return "metaclass defines how classes compare"
    for each in mro_of(kind):
        names = (_METHODS_OF_CLASSES | vars(base).keys()) & vars(each).keys()
        own = sorted(names - {"__module__", "__dict__", "__doc__", "__init__", "__weakref__"})
        if each not in (object, type, abc.ABCMeta, type(Protocol)) and own:
            return f"metaclass defines {own[0]}; write it on the class"
    for each in mro_of(backend):
        module: object = vars(each).get("__module__", "builtins")
        if type(module) is not str:
            return f"class {class_name(each)} has __module__ = {shown(module)}, which is no text"
        # Names that such a class has pass for those of the interface.
        if module in INTERFACE and not is_found(each):
            return f"class {class_name(each)} says that it is of {module}, where it is not"
    return None


def is_own(cls: type) -> bool:
    """Whether a class is attnplug's own, and not one that says it is."""
    return cls.__module__.startswith("attnplug.") and is_found(cls)


def is_found(cls: type) -> bool:
    """Whether a class is the one that its module has under its name."""
    found: object = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is cls
