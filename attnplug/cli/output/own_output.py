"""Keeps the output of a command apart from what plugins print: theirs goes to standard error."""

from __future__ import annotations

import functools
import io
import os
import select
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TextIO, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Streams:
    """The stream of the command that runs, and the stream that plugins see as `sys.stdout`."""

    own: TextIO | None = None
    of_plugins: TextIO | None = None
    quiet: bool = False


def own_stream() -> TextIO:
    """Standard output of the command, which plugins do not see."""
    return _Streams.own or sys.stdout


def set_quiet(wanted: bool) -> bool:
    """Say whether the command that begins prints its result and errors alone; gives `wanted`."""
    _Streams.quiet = wanted
    return wanted


def is_quiet() -> bool:
    """Whether the command prints its result and errors alone: no progress, notes and advice."""
    return _Streams.quiet


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


class _Patient(io.FileIO):
    """A file that waits until it can be written to."""

    def write(self, data: Any) -> int:
        """Write some bytes of `data`, at least one; gives their number."""
        # Another process may have made the file return at once instead of waiting.
        while (count := super().write(data)) is None:
            # Windows has neither poll nor such a standard output.
            poll = select.poll()
            poll.register(self.fileno(), select.POLLOUT)
            poll.poll()
        return count


class _Messages(_Patient):
    """Standard error, which drops what it cannot write."""

    def write(self, data: Any) -> int:
        """Write `data`, or nothing."""
        try:
            return super().write(data)
        # A message without a reader must not change the exit code.
        except OSError:
            return len(data)


def _stream(raw: _Patient, like: TextIO, *, line_buffering: bool) -> TextIO:
    """A text stream to a file, with the encoding of another stream."""
    return io.TextIOWrapper(
        io.BufferedWriter(raw), like.encoding, "backslashreplace", line_buffering=line_buffering
    )


_STANDARD = (0, 1, 2)


def open_standard_streams() -> None:
    """Open the standard streams that are closed on the null device."""
    # A file that is opened later would get the number of a closed one, and be taken for that stream.
    for number in _STANDARD:
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            # Children inherit the standard streams, and Python opens all other files for itself alone.
            os.set_inheritable(number, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, f"__{name}__") is None:
            number = _STANDARD[("stdin", "stdout", "stderr").index(name)]
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115  (open until the end)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def reserve_standard_output() -> TextIO:
    """A new stream to standard output, as `sys.stdout`; file descriptor 1 writes to standard error from now on.

    Code in C, and children of a plugin, write to the descriptor.
    """
    theirs = sys.stdout
    isatty = theirs.isatty()
    own = _stream(_Patient(os.dup(1), "wb"), theirs, line_buffering=isatty)
    sys.stderr = _stream(_Messages(2, "wb", closefd=False), sys.stderr, line_buffering=True)
    # It is not put back, because C flushes its buffers at exit.
    try:
        os.dup2(2, 1)
    except OSError:  # standard error is closed
        _write_nowhere(1)
    _Streams.of_plugins, sys.stdout = theirs, own
    return own


def leave_standard_output() -> None:
    """Drop the output that is left, after a write that failed."""
    # Python would try to write it again at its exit.
    _write_nowhere(own_stream().fileno())


def _write_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
