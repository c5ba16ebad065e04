"""What FlashInfer compiles at first use is said before it happens, and refused before a step where it cannot."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar

from attnplug.backends.flashinfer.library import Library, Module
from attnplug.core.errors import PluginError

__all__ = ["announced", "watch_compiling"]

_WATCHES: ContextVar[tuple[list[str], ...]] = ContextVar("watches", default=())
_LOG = logging.getLogger("attnplug.backends.flashinfer")
_ONE_AT_A_TIME = threading.Lock()
"""Threads that want the same module would write its sources under each other: only building is locked there."""


@contextlib.contextmanager
def watch_compiling() -> Iterator[list[str]]:
    """Inside, the list given grows by the name of each module that is compiled, or loaded for another builder."""
    found: list[str] = []
    token = _WATCHES.set((*_WATCHES.get(), found))
    try:
        yield found
    finally:
        _WATCHES.reset(token)


@contextlib.contextmanager
def announced(library: Library, built: Module, why: str) -> Iterator[None]:
    """Inside, a module is loaded, or compiled where it is not built: that is logged at INFO, with how long it took.

    Threads take turns.

    Args:
        library: which library.
        built: the module.
        why: for which layers and what work, as "decode of layers 0, 2".

    Raises:
        PluginError: it is not built, and cannot be compiled here; the text has the remedy.
    """
    with _ONE_AT_A_TIME:
        name = library.module_name(built)
        prebuilt = library.is_prebuilt(name)
        compiled = not prebuilt and library.is_compiled(name)
        if not prebuilt:
            problem = library.why_not_loading() if compiled else library.why_not_compiling()
            if problem is not None:
                work = "load" if compiled else "compile"
                raise PluginError(f"FLASHINFER has to {work} {built} for {why}, and cannot: {problem}")
        if prebuilt or compiled:
            yield
            _tell(name)
            return
        _LOG.info("FlashInfer %s compiles %s (%s), once, for %s", library.version, built, name, why)
        began = time.perf_counter()
        yield
        _LOG.info("FlashInfer compiled %s in %.1f s", name, time.perf_counter() - began)
        _tell(name)


def _tell(name: str) -> None:
    for found in _WATCHES.get():
        found.append(name)
