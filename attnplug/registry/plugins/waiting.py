"""Waits of one thread for another that runs code of plugins, which may itself wait for the first: none lasts for ever.

Guarded calls into plugins, and a watcher that hears which of their code runs next.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from attnplug.core.interface.guarded import describe as describe
from attnplug.core.interface.guarded import guarded_call as guarded_call
from attnplug.core.interface.guarded import plain_list as plain_list
from attnplug.core.interface.guarded import plain_text as plain_text

WAIT_IN_IMPORT: Final = 10.0
"""Seconds for which a thread waits where the other one seems to wait too, or may wait for a module that this one imports."""
# Seconds after which a thread waits no longer. Code of plugins that runs in a listing takes far less.
_LONGEST = 60.0
_STEP = 0.05


def waited(is_done: Callable[[float], bool], other: Callable[[], int | None]) -> bool:
    """Whether `is_done` became true, before it was plain that the other thread waits for this one.

    Args:
        is_done: waits for the seconds given, and says whether the wait has ended.
        other: the identity of the thread that is waited for; None where nobody knows.
    """
    began = time.monotonic()
    short = is_importing()
    # In short steps, because only a look at the other thread's stack shows that it waits for this one.
    while not is_done(_STEP):
        seconds = time.monotonic() - began
        frame = sys._current_frames().get(other() or 0)
        if _joins_me(frame) or seconds > _LONGEST:
            return False
        if seconds > WAIT_IN_IMPORT and (short or _is_waiting(frame)):
            return False
    return True


def module_is_free(name: str) -> bool:
    """Whether this thread can import a module without a wait that lasts for ever; waits while another imports it."""

    def is_done(seconds: float) -> bool:
        if _importer_of(name) is not None:
            time.sleep(seconds)
        return _importer_of(name) is None

    return _importer_of(name) is None or waited(is_done, lambda: _importer_of(name))


def _importer_of(name: str) -> int | None:
    """The other thread that executes the body of a module, or of a package that it is in; None without one."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        package = ".".join(parts[:end])
        # Python keeps these names private. Without them, nobody is known to import the module.
        locks: dict[str, Any] = getattr(getattr(importlib, "_bootstrap", None), "_module_locks", {})
        lock = locks.get(package, lambda: None)()
        owner = getattr(lock, "owner", None)
        spec = getattr(sys.modules.get(package), "__spec__", None)
        if getattr(spec, "_initializing", False) and owner not in (None, threading.get_ident()):
            return int(owner)
    return None


def is_joined_by_import() -> bool:
    """Whether another thread waits in `join` for this one, and executes the body of a module meanwhile."""
    return any(_joins_me(frame) and is_importing(frame) for frame in sys._current_frames().values())


def is_importing(frame: FrameType | None = None) -> bool:
    """Whether this thread, or the one of `frame`, is executing the body of a module that is being imported."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load" and "importlib._bootstrap" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _joins_me(frame: FrameType | None) -> bool:
    """Whether a thread is in `join` of this one."""
    join = threading.Thread.join.__code__
    while frame is not None and _is_waiting(frame):
        if frame.f_code is join and frame.f_locals.get("self") is threading.current_thread():
            return True
        frame = frame.f_back
    return False


def _is_waiting(frame: FrameType | None) -> bool:
    """Whether a thread is in a wait of Python's own: for another thread, an event, a condition or a queue."""
    return frame is not None and frame.f_code.co_filename == threading.__file__


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
