"""The changes of an import in its process, and those that it must not make: connect, start processes or threads."""

from __future__ import annotations

import gc
import locale
import logging
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

_ACTS = {
    "socket.connect": "connects to the network",
    "socket.getaddrinfo": "asks for an address of the network",
    "subprocess.Popen": "starts a process",
    "os.system": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.fork": "starts a process",
}
_STATES: dict[str, Callable[[], Any]] = {
    "environment variables": lambda: dict(os.environ),
    "working directory": os.getcwd,
    "sys.path": lambda: list(sys.path),
    "sys.excepthook": lambda: sys.excepthook,
    "recursion limit": sys.getrecursionlimit,
    "garbage collector": gc.isenabled,
    "handlers of signals": lambda: {each: signal.getsignal(each) for each in signal.valid_signals()},
    "root logger": lambda: (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
    "random state": random.getstate,
    "locale": lambda: locale.setlocale(locale.LC_ALL),
    "threads": lambda: sorted(each.name for each in threading.enumerate()),
}
_NAMED = ("environment variables", "threads", "sys.path")


class ImportEffects:
    """Watches from its creation on; an audit hook cannot be removed, so it belongs in a child process."""

    def __init__(self) -> None:
        self._before = {name: read() for name, read in _STATES.items()}
        self._acts: list[str] = []
        self._watches = True
        sys.addaudithook(self._note)

    def _note(self, event: str, given: tuple[object, ...]) -> None:
        if self._watches and event in _ACTS:
            frames = traceback.extract_stack()[:-1]
            own = [each for each in frames if not each.filename.startswith("<frozen")]
            self._acts.append(f"{_ACTS[event]} ({own[-1].filename}:{own[-1].lineno})")

    def found(self) -> list[str]:
        """What the import did and changed, each as a phrase with a verb; stops watching."""
        self._watches = False
        changes = []
        for name, before in self._before.items():
            after = _STATES[name]()
            if after != before:
                changes.append(f"changes the {name}{_difference(name, before, after)}")
        return [*dict.fromkeys(self._acts), *changes]


def _difference(name: str, before: Any, after: Any) -> str:
    if name not in _NAMED:
        return ""
    old, new = (each.items() if isinstance(each, dict) else each for each in (before, after))
    names = [str(each[0] if isinstance(each, tuple) else each) for each in new if each not in old]
    return f": {', '.join(names)}" if names else ""
