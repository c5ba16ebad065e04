"""Guarded calls into plugins, and a watcher that hears which of their code runs next."""

from __future__ import annotations

from collections.abc import Callable

from attnplug.core.interface.guarded import describe as describe
from attnplug.core.interface.guarded import guarded_call as guarded_call
from attnplug.core.interface.guarded import plain_list as plain_list
from attnplug.core.interface.guarded import plain_text as plain_text


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
