"""Calls into plugins, which return an exception instead of raising it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from attnplug.core.text import safe_text, shown


class _Watcher:
    """The function that hears what plugin code runs next; one process has one."""

    hears: Callable[[str], None] | None = None


def watch_plugins(hears: Callable[[str], None]) -> None:
    """Call `hears` with "while it imported the plugin ..." before such code runs, and with "" after it."""
    _Watcher.hears = hears


def announce(step: str = "") -> None:
    """Tell the watcher, if there is one, what the process does next; "" for attnplug's own code."""
    if _Watcher.hears is not None:
        _Watcher.hears(step)


def guarded_call(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, BaseException | None]:
    """The result of a call and None, or None and the exception that it raised, SystemExit included.

    A result may run code of the plugin when it is read, so a caller checks and copies it inside `call`.
    KeyboardInterrupt is raised, because the user sent it.
    """
    try:
        return call(*args, **kwargs), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (a panic in a Rust extension is not an Exception)
        return None, error


def describe(error: BaseException) -> str:
    """An exception in one line that is safe to print: its type and its message."""
    text, failure = guarded_call(lambda: " ".join(str(error).split()))
    words = text if failure is None else "its message cannot be read"
    name = type.__dict__["__name__"].__get__(type(error))
    return safe_text(f"{name}: {words}" if words else name)


def plain_text(value: object) -> str:
    """`value` as text of exactly the type str; TypeError if it is none."""
    if not isinstance(value, str):
        raise TypeError(f"{shown(value)} is not text")
    # A subclass may compare and format as it likes.
    return str.__str__(value)


def listed(values: object, most: int = 1000) -> list[Any]:
    """A list of what a plugin returned; TypeError for what is not a sequence, or has more than `most` entries."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(f"{shown(values)} is not a sequence")
    found = list(itertools.islice(values, most + 1))
    if len(found) > most:
        raise TypeError(f"a sequence of more than {most} entries")
    return found
