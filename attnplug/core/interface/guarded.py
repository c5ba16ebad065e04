"""Calls into code of plugins, which return an exception instead of raising it, and plain copies of what it gives."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

from attnplug._system.text import shortened, shown

_SEQUENCES = (tuple, list, range)


class Forks:
    """Counts the forks that led to this process, without a question to the system at each call."""

    count = 0

    @classmethod
    def note(cls) -> None:
        """Called in each new child."""
        cls.count += 1

    @staticmethod
    def end_child() -> NoReturn:
        """End a child that code of a plugin forked.

        A child that goes on would do this process's work again, and print a second document.
        """
        # Without cleanup, which would write the parent's buffers a second time.
        os._exit(1)


# Windows has no fork.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Forks.note)


def guarded_call(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, BaseException | None]:
    """The result of a call and None, or None and the exception that it raised, SystemExit included.

    A result may run code of the plugin when it is read, so a caller checks and copies it inside `call`.
    KeyboardInterrupt is raised, because the user sent it. A child process that the call forked ends here.
    """
    forks = Forks.count
    try:
        return call(*args, **kwargs), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (a panic in a Rust extension is not an Exception)
        return None, error
    finally:
        if Forks.count != forks:
            Forks.end_child()


def describe(error: BaseException) -> str:
    """An exception in one line that is safe to print and not too long: its type and its message."""
    text, failure = guarded_call(lambda: shortened(" ".join(str.__str__(str(error)).split())))
    words = text if failure is None else "its message cannot be read"
    name = class_name(type(error))
    return f"{name}: {words}" if words else name


def class_name(cls: type) -> str:
    """The name of a class as Python knows it, without a question to its metaclass."""
    # The descriptor of `type` itself, because a metaclass may have a `__name__` of its own.
    name: str = type.__dict__["__name__"].__get__(cls)
    return shortened(name, 200)


def class_title(cls: type) -> str:
    """The module and the qualified name of a class, for reasons and errors; runs no code of the class."""
    module = type.__dict__["__dict__"].__get__(cls).get("__module__")
    name: str = type.__dict__["__qualname__"].__get__(cls)
    return shortened(f"{module}.{name}" if type(module) is str else name, 200)


def mro_of(cls: type) -> tuple[type, ...]:
    """The classes that a class inherits from, itself first, as Python knows them; asks no metaclass."""
    found: tuple[type, ...] = type.__dict__["__mro__"].__get__(cls)
    return found


def plain_text(value: object) -> str:
    """`value` as text of exactly the type str; TypeError if it is none."""
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} is not text")
    # A subclass may compare and format as it likes.
    return str.__str__(value)


def plain_list(values: object, most: int = 1000) -> list[Any]:
    """A list of the entries of a built-in sequence; TypeError for another value, or for more than `most`.

    Iterators and sequences of other classes are not read: they can have no end, or wait for ever.
    """
    kind: Any = type(values)
    if kind not in _SEQUENCES:
        kind = next((each for each in _SEQUENCES if isinstance(values, each)), None)
    if kind is None:
        raise TypeError(f"{shown(values)} is not a sequence: a tuple or list")
    # The methods of the built-in type, because a subclass may have its own.
    built_in: Any = values
    if kind.__len__(built_in) > most:
        raise TypeError(f"a sequence of more than {most} entries")
    return list(kind.__iter__(built_in))
