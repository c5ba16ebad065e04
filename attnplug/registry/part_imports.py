"""Imports the parts of backends once each, without a lock that an import in another thread could wait for."""

from __future__ import annotations

import enum
import sys
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from attnplug.core.reasons import Reason
from attnplug.registry.gates import import_parts

if TYPE_CHECKING:
    from types import FrameType

    from attnplug.core.backend import AttentionBackend

WAIT_IN_IMPORT: Final = 10.0
"""Seconds for which a thread that imports a module itself waits for an import in another thread."""


class _Pending(enum.Enum):
    PENDING = enum.auto()


PENDING: Final = _Pending.PENDING
"""Not known yet: another thread imports the parts, and waiting for it could last for ever."""
Pending: TypeAlias = Literal[_Pending.PENDING]


class PartImports:
    """Whether the parts of each backend import here. Importing a kernel library is slow, so each is tried once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[type[AttentionBackend], tuple[int, Future[Reason | None]]] = {}

    def failure(self, backend: type[AttentionBackend]) -> Reason | Pending | None:
        """Why the parts of a backend do not import, or None. The first thread that asks imports them.

        Other threads wait for its result. A thread that is importing a module itself waits for
        `WAIT_IN_IMPORT` seconds at most, because the first thread may be waiting for that module. It then
        gets PENDING, as does a call by the parts themselves while they are imported.
        """
        me, mine = threading.get_ident(), Future[Reason | None]()
        with self._lock:
            owner, result = self._found.setdefault(backend, (me, mine))
        if result is not mine:
            if owner == me and not result.done():
                return PENDING
            try:
                return result.result(WAIT_IN_IMPORT if is_importing() else None)
            except TimeoutError:
                return PENDING
        try:
            reason = import_parts(backend)
        except BaseException:
            # Such as KeyboardInterrupt: nothing is known, so the next call tries again, and those who wait see it.
            with self._lock:
                del self._found[backend]
            result.set_result(None)
            raise
        result.set_result(reason)
        return reason


def is_importing() -> bool:
    """Whether this thread is executing the body of a module that is being imported."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load" and "importlib._bootstrap" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
