"""Calls into plugins: whatever they raise is theirs to answer for, and stops there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["attempt", "describe"]


def attempt(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Exception | SystemExit | None]:
    """The result of a call and None, or None and what it raised; SystemExit is contained too."""
    try:
        return call(*args, **kwargs), None
    except (Exception, SystemExit) as error:  # noqa: BLE001  (a plugin may raise anything)
        return None, error


def describe(error: BaseException) -> str:
    """An exception in one line: its type and its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
