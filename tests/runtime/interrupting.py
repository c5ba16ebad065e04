"""Interrupts a call at each line of the package in turn, as Ctrl-C may."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import attnplug

_T = TypeVar("_T")
_PACKAGE = str(Path(attnplug.__file__).parent) + os.sep
_MOST_LINES = 100_000


class Interrupt(KeyboardInterrupt):
    """Tells these interrupts from a user's."""


def run_to_line(call: Callable[[], object], number: int) -> bool:
    """Run `call`, and raise Interrupt before line `number` of the package is run; whether the call got there."""
    passed = 0

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        nonlocal passed
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            passed += 1
            if passed == number:
                raise Interrupt
        return trace

    before, unraisable = sys.gettrace(), sys.unraisablehook
    # Python ignores what a finalizer raises, so the call goes on.
    sys.unraisablehook = lambda found: None if isinstance(found.exc_value, Interrupt) else unraisable(found)
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(before)
        sys.unraisablehook = unraisable
    return passed >= number


def at_each_line(
    make: Callable[[], _T], call: Callable[[_T], object], check: Callable[[_T], None], every: int = 1
) -> int:
    """Interrupt `call` of a new object at its first line, its second, and so on; `check` the object each time.

    Args:
        make: gives a new object.
        call: the call of it.
        check: looks at the object after the interrupt, and last after a call that was not interrupted.
        every: lines from one interrupt to the next.

    Returns:
        The number of interrupts, which is the number of lines that the call runs if `every` is 1.
    """
    for count, number in enumerate(range(1, _MOST_LINES, every)):
        made = make()
        was_interrupted = run_to_line(lambda made=made: call(made), number)  # type: ignore[misc]
        check(made)
        if not was_interrupted:
            return count
    raise AssertionError(f"the call runs {_MOST_LINES} lines")
