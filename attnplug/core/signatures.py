"""The parameters of methods that a class overrides, against those that attnplug gives; nothing is called."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any


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


def cannot_take(found: inspect.Signature, expected: inspect.Signature) -> str | None:
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
