"""Calls into plugins, which return an exception instead of raising it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attnplug.core.text import safe_text


def guarded_call(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, BaseException | None]:
    """The result of a call and None, or None and the exception that it raised, SystemExit included.

    KeyboardInterrupt is raised, because the user sent it.
    """
    try:
        return call(*args, **kwargs), None
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001  (a panic in a Rust extension is not an Exception)
        return None, error


def describe(error: BaseException) -> str:
    """An exception in one line that is safe to print: its type and its message."""
    text, failure = guarded_call(str, error)
    words = " ".join(text.split()) if failure is None else "its message cannot be read"
    return safe_text(f"{type(error).__name__}: {words}" if words else type(error).__name__)
