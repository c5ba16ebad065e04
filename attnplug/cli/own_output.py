"""Keeps the output of a command apart from what plugins print: theirs goes to standard error."""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable
from typing import ParamSpec, TextIO, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Streams:
    """The stream of the command that runs, and the stream that plugins see as `sys.stdout`."""

    own: TextIO | None = None
    of_plugins: TextIO | None = None


def own_stream() -> TextIO:
    """Standard output of the command, which plugins do not see."""
    return _Streams.own or sys.stdout


def apart_from_plugins(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """A command during which `sys.stdout` is standard error for all code but attnplug's own output."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if _Streams.own is not None:  # a command inside another one
            return command(*args, **kwargs)
        _Streams.own, sys.stdout = sys.stdout, _Streams.of_plugins or sys.stderr
        try:
            return command(*args, **kwargs)
        finally:
            sys.stdout, _Streams.own = _Streams.own, None

    return run


def is_own_process() -> bool:
    """Whether this process runs the program alone: nobody replaced its standard output, as tests do."""
    try:
        return sys.__stdout__ is not None and sys.stdout is sys.__stdout__ and sys.stdout.fileno() == 1
    except (AttributeError, OSError, ValueError):
        return False


def reserve_standard_output() -> TextIO:
    """A new stream to standard output, as `sys.stdout`; file descriptor 1 writes to standard error from now on.

    Code in C, and children of a plugin, write to the descriptor. It is not put back: C flushes its buffers at exit.
    """
    theirs = sys.stdout
    isatty = theirs.isatty()
    own = io.TextIOWrapper(
        os.fdopen(os.dup(1), "wb"), theirs.encoding, "backslashreplace", line_buffering=isatty
    )
    try:
        os.dup2(2, 1)
    except OSError:  # standard error is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
    _Streams.of_plugins, sys.stdout = theirs, own
    return own


def leave_standard_output() -> None:
    """Drop the output that is left, after a write that failed: Python would try it again at its exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, own_stream().fileno())
    os.close(nowhere)
