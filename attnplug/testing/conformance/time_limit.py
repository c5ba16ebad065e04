"""The time limit of the check under way, of which naming a mistake may take a share."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from attnplug._system.scopes import Scopes

_SHARE = 0.25
"""Part of the time left that naming may take, so that the failure itself is always reported."""
_MOST_SECONDS = 15.0

_END: Scopes[float] = Scopes("attnplug_check_end")


def time_limit(seconds: float) -> AbstractContextManager[float]:
    """Declare that the check in this context is stopped after `seconds`."""
    return _END.block(time.monotonic() + seconds)


def naming_seconds() -> float:
    """The seconds that the search for a known mistake may take now."""
    ends = _END.get()
    return max(0.0, min(_MOST_SECONDS, _SHARE * (ends[0] - time.monotonic()))) if ends else _MOST_SECONDS
