"""Words for a step that lasts, on standard error of a terminal."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from rich.console import Console

from attnplug._system.terminal_tables import SafeConsole

AFTER = 0.5
"""Seconds after which a user wonders what the command does."""


@contextlib.contextmanager
def waiting(words: str, after: float = AFTER, console: Console | None = None) -> Iterator[None]:
    """Inside the block, a spinner with `words` from `after` seconds on; nothing where no one reads a terminal."""
    console = console or SafeConsole(file=sys.stderr)
    if not console.is_terminal or console.is_dumb_terminal:
        yield
        return
    status = console.status(words)
    timer = threading.Timer(after, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # A start that has begun must end before the stop.
        timer.join()
        status.stop()
