"""Announces FlashInfer's compilations before they start, and builds modules ahead of their use."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

from attnplug._system.scopes import Scopes
from attnplug.backends.flashinfer.library import Library
from attnplug.backends.flashinfer.modules import LatentModule, Module
from attnplug.core.errors import PluginError

_WATCHES: Scopes[list[str]] = Scopes("watches")
_LOG = logging.getLogger("attnplug.backends.flashinfer")
_MAX_JOBS = threading.Lock()
# FlashInfer locks the build of a module, but not the writing of its sources: two threads would mix them up.
_ONE_AT_A_TIME = threading.Lock()


def watch_compiling() -> AbstractContextManager[list[str]]:
    """Inside, the list grows by the name of each module that is compiled, or loaded for another builder."""
    return _WATCHES.block([])


@contextlib.contextmanager
def announced(library: Library, built: Module | LatentModule, why: str) -> Iterator[None]:
    """Inside, FlashInfer loads a module, or compiles it; a compilation is logged at INFO with its seconds.

    Threads take turns.

    Args:
        library: which library.
        built: the module.
        why: the work and the layers, such as "decode of layers 0, 2".

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
        else:
            _LOG.info("FlashInfer %s compiles %s (%s), once, for %s", library.version, built, name, why)
            began = time.perf_counter()
            yield
            _LOG.info("FlashInfer compiled %s in %.1f s", name, time.perf_counter() - began)
        for found in _WATCHES.get():
            found.append(name)


# A few of the ten sources of a module take far longer than the others, so more at once would gain little.
_SOURCES_EACH = 4
"""Sources compiled at once per module."""


def build_modules(
    library: Library,
    modules: Iterable[Module | LatentModule],
    *,
    jobs: int | None = None,
    done: Callable[[Module | LatentModule, float], None] | None = None,
) -> list[Module | LatentModule]:
    """Build modules ahead of use, the slowest first; FlashInfer alone builds one at a time, at its first use.

    Args:
        library: FlashInfer.
        modules: the modules that will be needed; those already built are skipped.
        jobs: processors to keep busy; None for all.
        done: called with each module and its build time in seconds.

    Returns:
        The modules that were built.

    Raises:
        PluginError: nothing can be compiled here; the text has the remedy.
        RuntimeError: a compiler failed, as FlashInfer says.
    """
    lacking = [
        each
        for each in dict.fromkeys(modules)
        if not (library.is_prebuilt(name := library.module_name(each)) or library.is_compiled(name))
    ]
    if not lacking:
        return []
    problem = library.why_not_compiling()
    if problem is not None:
        raise PluginError(f"FLASHINFER has to compile {len(lacking)} modules, and cannot: {problem}")
    lacking.sort(key=lambda each: (each.template != "fa3", -_width(each)))
    busy = jobs or os.cpu_count() or 1
    sources = [(each, library.source(each)) for each in lacking]
    # Before 0.6 all builds share one ninja log, which two builds at once would corrupt.
    workers = max(1, busy // _SOURCES_EACH) if all(hasattr(spec, "build_dir") for _, spec in sources) else 1

    def build(module: Module | LatentModule, spec: object) -> None:
        began = time.perf_counter()
        spec.build(False, True)  # type: ignore[attr-defined]  # quietly, and locked against other processes
        if done is not None:
            done(module, time.perf_counter() - began)

    # 1.5 jobs per processor: a module often waits for its slowest source.
    jobs = max(1, -(-busy * 3 // (2 * workers)))
    with _max_jobs(jobs), concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for work in [pool.submit(build, module, spec) for module, spec in sources]:
            work.result()
    return lacking


@contextlib.contextmanager
def _max_jobs(jobs: int) -> Iterator[None]:
    """Inside, ninja runs so many jobs."""
    # Threads take turns, because the variable belongs to the process.
    with _MAX_JOBS:
        before = os.environ.get("MAX_JOBS")
        os.environ["MAX_JOBS"] = str(jobs)
        try:
            yield
        finally:
            if before is None:
                del os.environ["MAX_JOBS"]
            else:
                os.environ["MAX_JOBS"] = before


def _width(built: Module | LatentModule) -> int:
    return sum(built.sizes) if isinstance(built, LatentModule) else built.head_size
