"""What an import changes in its process, and what it must not do: connect, start processes or threads.

What the import of an impl and a builder changes in its process, apart from what libraries change.
"""

from __future__ import annotations

import contextlib
import gc
import io
import locale
import logging
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attnplug.testing.conformance.harness  # noqa: F401
from attnplug.core.backend import AttentionBackend
from attnplug.testing.conformance.process.process_settings import read_settings, restore_settings
from attnplug.testing.conformance.process.setting import change_of

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


# The kit itself loads these before a check of settings begins.


def part_effects(backend: type[AttentionBackend]) -> list[str]:
    """Each change by `get_impl_cls` and `get_builder_cls`, as a phrase with a verb; for a process of its own.

    The backend's own modules are imported a second time. Then all libraries are loaded, so every change is its own.
    """
    before, loaded = read_settings(), set(sys.modules)
    found = _changes(backend, of_libraries=False)
    again = [name for name in sys.modules.keys() - loaded if _is_own(name, backend)]
    restore_settings(before)
    for name in again:
        del sys.modules[name]
    printed = io.StringIO()
    # Some modules cannot be imported twice, such as those that register an operator of torch.
    with contextlib.suppress(Exception), contextlib.redirect_stdout(printed):
        found += _changes(backend, of_libraries=True)
    return [*dict.fromkeys(found), *(["prints to stdout"] if printed.getvalue() else [])]


def _is_own(name: str, backend: type[AttentionBackend]) -> bool:
    """Whether a module is of the backend's package, or a file beside its module."""
    package = backend.__module__.partition(".")[0]
    file, home = (getattr(sys.modules[each], "__file__", None) for each in (name, backend.__module__))
    is_beside = file is not None and home is not None and Path(file).parent == Path(home).parent
    return name.partition(".")[0] == package or is_beside


def _changes(backend: type[AttentionBackend], of_libraries: bool) -> list[str]:
    before = read_settings()
    backend.get_impl_cls()
    backend.get_builder_cls()
    return [
        f"changes {change_of(setting, before[setting], value)}"
        for setting, value in read_settings().items()
        if value != before[setting] and (of_libraries or not setting.by_imports)
    ]
