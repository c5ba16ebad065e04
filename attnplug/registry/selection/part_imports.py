"""Imports the parts of backends once each, without a lock that an import in another thread could wait for."""

from __future__ import annotations

import enum
import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from attnplug.core.reasons import Reason
from attnplug.registry.plugins.waiting import is_joined_by_import, waited
from attnplug.registry.selection.gates import import_parts

if TYPE_CHECKING:
    from attnplug.core.backend import AttentionBackend


class _StillImporting(enum.Enum):
    STILL_IMPORTING = enum.auto()


STILL_IMPORTING: Final = _StillImporting.STILL_IMPORTING
"""Not known yet: another thread imports the parts, and waiting for it could last for ever."""
StillImporting: TypeAlias = Literal[_StillImporting.STILL_IMPORTING]


class PartImports:
    """Whether the parts of each backend import here. Importing a kernel library is slow, so each is tried once."""

    def __init__(self) -> None:
        # Reentrant: an interrupt at the end of `with` leaves it held by this thread.
        self._lock = threading.RLock()
        self._found: dict[type[AttentionBackend], tuple[int, Future[Reason | None]]] = {}

    def under_way(self) -> PartImports:
        """A new record that knows only the imports that other threads have begun, and begins no second one of these."""
        made = PartImports()
        with self._lock:
            made._found = {each: known for each, known in self._found.items() if not known[1].done()}
        return made

    def failure(self, backend: type[AttentionBackend]) -> Reason | StillImporting | None:
        """Why the parts of a backend do not import, or None. The first thread that asks imports them.

        Other threads wait for its result, unless the first may be waiting for them; see `waited`. They then get
        PENDING, as does a call by the parts themselves while they are imported.
        """
        me, mine = threading.get_ident(), Future[Reason | None]()
        # Such a module may be one of the parts, whose import would wait for the other thread.
        if backend not in self._found and is_joined_by_import():
            return STILL_IMPORTING
        with self._lock:
            owner, result = self._found.setdefault(backend, (me, mine))
        if result is not mine:
            if owner == me and not result.done():
                return STILL_IMPORTING
            if result.done():
                return result.result()
            if not waited(lambda seconds: bool(wait([result], seconds).done), lambda: owner):
                return STILL_IMPORTING
            return result.result()
        try:
            reason = import_parts(backend)
        except BaseException:
            # Such as KeyboardInterrupt: nothing is known, so the next call tries again, and those who wait see it.
            with self._lock:
                self._found.pop(backend, None)
            result.set_result(None)
            raise
        result.set_result(reason)
        return reason
