"""Values of options: checked against the annotation of their field, and as the plain values that JSON has."""

from __future__ import annotations

import collections.abc
import enum
import functools
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

from attnplug.core.interface.guarded import guarded_call

_LETTERS = (str, bytes, bytearray)
_PLAIN = (bool, int, float, str, type(None))


def as_tuples(value: Any) -> Any:
    """A value read from JSON, with tuples for lists: options have no lists, because they must be hashable."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


# Python evaluates the annotations again at each call, which takes longer than all else of a selection's options.
@functools.lru_cache(maxsize=256)
def fields_of(kind: type) -> Mapping[str, Any] | None:
    """The type of each option; None for a class that is not a dataclass."""
    if not is_dataclass(kind):
        return None
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


def read_value(value: Any, hint: Any) -> Any:
    """`value` as the annotation `hint` has it: the value of an enumeration becomes its member.

    Raises:
        TypeError: it is of another type, or one of its elements is.
        ValueError: a tuple of another length, or no member of an enumeration.
    """
    hint = _resolved(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, typing.TypeVar):
        return value
    if hint is None or hint is type(None):
        return _checked(value, value is None)
    if origin is typing.Literal:
        return _one_of(value, arguments)
    if origin in (typing.Union, types.UnionType):
        return _one_type_of(value, arguments)
    kind = origin or hint
    # A hint that is not a class cannot be checked here; Options may still refuse the value.
    return _of_class(value, kind, hint) if isinstance(kind, type) else value


def _of_class(value: Any, kind: type, hint: Any) -> Any:
    """`value` as the class `kind` has it, which `hint` gives with the types of its elements."""
    arguments = typing.get_args(hint)
    if isinstance(value, bool) and kind is not bool and issubclass(kind, (int, float)):
        raise TypeError
    if kind is float:
        return _checked(value, isinstance(value, (int, float)))
    if issubclass(kind, enum.Enum):
        return _member(value, kind)
    _checked(value, isinstance(value, kind))
    if issubclass(kind, tuple) and (arguments or str(hint).endswith("[()]")):
        elements: Any = value
        return _elements(elements, arguments)
    if arguments and issubclass(kind, collections.abc.Iterable):
        if isinstance(value, _LETTERS):
            raise TypeError  # text is not a sequence of options
        if isinstance(value, tuple):
            return _elements(value, (arguments[0], ...))
    return value


def _resolved(hint: Any) -> Any:
    """The type behind a NewType or an alias."""
    while True:
        behind = getattr(hint, "__supertype__", hint)
        if type(behind).__name__ == "TypeAliasType":
            behind = behind.__value__
        if behind is hint:
            return hint
        hint = behind


def _checked(value: Any, fits: bool) -> Any:
    if not fits:
        raise TypeError
    return value


def _one_of(value: Any, choices: Sequence[Any]) -> Any:
    # 1 == True, so the types are compared too.
    for each in choices:
        if alike(value, each):
            return each
    for each in choices:
        if isinstance(each, enum.Enum) and alike(value, plain_value(each)):
            return each
    raise ValueError


def _one_type_of(value: Any, choices: Sequence[Any]) -> Any:
    read = [
        found for each in choices for found, error in [guarded_call(read_value, value, each)] if not error
    ]
    # A value that fits as it is comes before one that becomes a member of an enumeration.
    for found in read:
        if alike(found, value):
            return found
    return _checked(next(iter(read), value), bool(read))


def _member(value: Any, kind: type[enum.Enum]) -> Any:
    if isinstance(value, kind):
        return value
    if isinstance(value, enum.Enum):
        raise TypeError  # a member of another enumeration
    member = kind(value)
    # Enum(True) is the member of 1.
    return _checked(member, types_within(plain_value(member)) == types_within(value))


def _elements(value: tuple[Any, ...], hints: Sequence[Any]) -> Any:
    each = list(hints)
    if len(each) == 2 and each[1] is Ellipsis:
        each = each[:1] * len(value)
    if len(each) != len(value):
        raise ValueError
    read = tuple(map(read_value, value, each))
    return value if alike(read, value) else read


def plain_value(value: Any) -> Any:
    """A value as JSON has it, with tuples for lists: a member of an enumeration becomes its value.

    Raises:
        TypeError: JSON has no such value, or would give one of another type.
    """
    if isinstance(value, enum.Enum):
        return plain_value(value.value)
    if type(value) is tuple:
        return tuple(map(plain_value, value))
    if type(value) not in _PLAIN or value in (float("inf"), float("-inf")) or value != value:
        raise TypeError
    return value


def round_trips(value: Any, hint: Any) -> bool:
    """Whether a value that a decision writes as JSON is the same, of the same type, when it is read back."""
    return alike(read_value(plain_value(value), hint), value)


def alike(one: Any, other: Any) -> bool:
    """Whether two values are equal and of the same type, those within tuples too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def make_options(kind: type[Any], plain: Mapping[str, Any]) -> Any:
    """An instance of a backend's Options from the plain values of its fields; see `plain_value`.

    Raises:
        KeyError, TypeError, ValueError: values that are not of this class; and what the class raises.
    """
    hints: Mapping[str, Any] = fields_of(cast("Hashable", kind)) or {}
    return kind(**{name: read_value(value, hints[name]) for name, value in plain.items()})


def types_within(value: Any) -> Any:
    """The types of a hashable value and its elements: equal values of other types are other options."""
    if isinstance(value, tuple):
        return (type(value), *map(types_within, value))
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), *(types_within(getattr(value, each.name, None)) for each in fields(value)))
    return type(value)
