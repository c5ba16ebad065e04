"""What FlashInfer compiles at first use is said before it happens, and refused before a step where it cannot."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator

from attnplug.backends.flashinfer.library import Library, Module
from attnplug.core.errors import PluginError

__all__ = ["announced"]

_LOG = logging.getLogger("attnplug.backends.flashinfer")


@contextlib.contextmanager
def announced(library: Library, built: Module, why: str) -> Iterator[None]:
    """Inside, a module is loaded, or compiled where it is not built: that is logged at INFO, with how long it took.

    Args:
        library: which library.
        built: the module.
        why: for which layers and what work, as "decode of layers 0, 2".

    Raises:
        PluginError: it is not built, and cannot be compiled here; the text has the remedy.
    """
    name = library.module_name(built)
    if library.is_built(name):
        yield
        return
    problem = library.why_not_compiling()
    if problem is not None:
        raise PluginError(f"FLASHINFER has to compile {built} for {why}, and cannot: {problem}")
    _LOG.info("FlashInfer %s compiles %s (%s), once, for %s", library.version, built, name, why)
    began = time.perf_counter()
    yield
    _LOG.info("FlashInfer compiled %s in %.1f s", name, time.perf_counter() - began)
