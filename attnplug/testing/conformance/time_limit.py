"""The time limit of the check under way, of which naming a mistake may take a share."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator

_SHARE = 0.25
"""Part of the time left that naming may take, so that the failure itself is always reported."""
_MOST_SECONDS = 15.0

_END: contextvars.ContextVar[float | None] = contextvars.ContextVar("attnplug_check_end", default=None)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Declare that the check in this context is stopped after `seconds`."""
    token = _END.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _END.reset(token)


def naming_seconds() -> float:
    """The seconds that the search for a known mistake may take now."""
    end = _END.get()
    return _MOST_SECONDS if end is None else max(0.0, min(_MOST_SECONDS, _SHARE * (end - time.monotonic())))
