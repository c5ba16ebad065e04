"""The parameters of methods that a class overrides, against those that attnplug gives; nothing is called.

Which names of the interface a class has replaced; looks only at classes and runs no code of theirs.
"""

from __future__ import annotations

import abc
import functools
import inspect
import sys
import types
from typing import Any, Protocol

from attnplug._system.text import shown
from attnplug.core.interface.guarded import class_name, mro_of


def methods_of(cls: type, base: type) -> dict[str, Any]:
    """The methods of the interface by name, as the nearest class of attnplug defines them; `__init__` too."""
    ours = (each for each in cls.__mro__ if each.__module__.startswith("attnplug.core."))
    return _methods(tuple(each for each in ours if issubclass(each, base)))


# Almost all plugins have the same few classes of attnplug above them.
@functools.lru_cache(maxsize=64)
def _methods(classes: tuple[type, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in classes:
        for name, value in vars(each).items():
            is_method = isinstance(value, (staticmethod, classmethod, types.FunctionType))
            if is_method and (not name.startswith("_") or name == "__init__"):
                found.setdefault(name, value)
    return found


@functools.lru_cache(maxsize=256)
def interface_signature(method: Any) -> inspect.Signature | None:
    """`signature_of` a method of the interface."""
    return signature_of(method, on_class=False)


def signature_of(raw: Any, *, on_class: bool) -> inspect.Signature | None:
    """The parameters that a caller gives; None where they cannot be known without a call."""
    function = raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw
    bound = isinstance(raw, classmethod) or (isinstance(raw, types.FunctionType) and not on_class)
    if not callable(function):
        return None
    try:
        signature = inspect.signature(function)
    # A function written in C may have no signature.
    except (TypeError, ValueError):
        return None
    parameters = list(signature.parameters.values())
    # A leading *args takes the class or the instance, and the rest too.
    if bound and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        parameters = parameters[1:]
    return signature.replace(parameters=parameters)


def is_alike(raw: Any, theirs: Any) -> bool:
    """Whether two methods have equal parameters; found without their signatures, which take 20 us to make."""
    if type(raw) is not type(theirs):
        return False
    found, expected = (getattr(each, "__func__", each) for each in (raw, theirs))
    # A wrapper's parameters are those of the function that it wraps.
    return (
        isinstance(found, types.FunctionType)
        and not vars(found)
        and _parameters(found) == _parameters(expected)
    )


def _parameters(function: types.FunctionType) -> tuple[object, ...]:
    code = function.__code__
    has_rest = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return names, code.co_posonlyargcount, code.co_kwonlyargcount, has_rest


def call_mismatch(found: inspect.Signature, expected: inspect.Signature) -> str | None:
    """Why a method with the parameters `found` cannot be called as `expected` is; None if it can."""
    by_name = [p.name for p in expected.parameters.values() if p.kind is p.KEYWORD_ONLY]
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    in_place = [p.name for p in expected.parameters.values() if p.kind in kinds]
    try:
        found.bind(*in_place, **dict.fromkeys(by_name))
    except TypeError as error:
        return str(error)
    return None


def definition_of(name: str, method: Any) -> str:
    """The line with which a class of its own defines a method of the interface."""
    signature, words = signature_of(method, on_class=False), ["self"]
    if isinstance(method, (staticmethod, classmethod)):
        words = ["cls"]
    for each in () if signature is None else signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(each.name if each.default is each.empty else f"{each.name}={each.default!r}")
    return f"def {name}({', '.join(words)})"


INTERFACE = ("attnplug.core.backend", "attnplug.core.impl", "attnplug.core.metadata")
"""The modules of the classes that a plugin subclasses."""


def owner_of(cls: type, name: str) -> type | None:
    """The class whose `name` a `cls` has, itself or one that it inherits from; None without one."""
    return next((each for each in cls.__mro__ if name in vars(each)), None)


def overrides(cls: type, name: str) -> bool:
    """Whether `cls`, or a class or mixin that it inherits from, has its own `name` of the interface."""
    owner = owner_of(cls, name)
    return owner is not None and owner.__module__ not in INTERFACE


# With these names of a metaclass, reading a class would run code of a plugin, or give another class's answer.
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
