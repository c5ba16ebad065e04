"""Signals that end a long run."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import FrameType

_SAME_SIGNAL_SECONDS = 1.0
"""Several signals within this time count as one."""


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """SIGTERM interrupts as SIGINT does, and several signals at once are one interrupt.

    coreutils' timeout sends its signal to this process, and then to its process group. The second signal must not stop
    the first one's handling, which writes the results.
    """
    last = -_SAME_SIGNAL_SECONDS

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _SAME_SIGNAL_SECONDS:
            last = now
            raise KeyboardInterrupt

    before = {each: signal.signal(each, interrupt) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
