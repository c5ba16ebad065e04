"""Modules built before they are needed, several at once: FlashInfer builds one at a time, when it is first used."""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable, Iterable

from attnplug.backends.flashinfer.library import Library, Module
from attnplug.core.errors import PluginError

__all__ = ["build_modules"]

_SOURCES_EACH = 4
"""Of a module's ten sources some take far longer than the others: so many at once keep the processors busy."""


def build_modules(
    library: Library,
    modules: Iterable[Module],
    *,
    jobs: int | None = None,
    done: Callable[[Module, float], None] | None = None,
) -> list[Module]:
    """Build the modules that are not built yet, the slowest first; FlashInfer then loads them.

    Args:
        library: FlashInfer.
        modules: what will be needed.
        jobs: processors to keep busy; None: all of this machine's.
        done: called with each module and the seconds that its build took.

    Returns:
        Those that were built.

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
    lacking.sort(key=lambda each: (each.template != "fa3", -each.head_size))
    busy = jobs or os.cpu_count() or 1
    sources = [(each, library.source(each)) for each in lacking]
    # Before 0.6 all builds keep one ninja log, which two at once would spoil.
    workers = max(1, busy // _SOURCES_EACH) if all(hasattr(spec, "build_dir") for _, spec in sources) else 1

    def build(module: Module, spec: object) -> None:
        began = time.perf_counter()
        spec.build(False, True)  # type: ignore[attr-defined]  # quietly, and locked against other processes
        if done is not None:
            done(module, time.perf_counter() - began)

    before = os.environ.get("MAX_JOBS")
    # Half as many again as there are processors, for the times when a module waits for its slowest source.
    os.environ["MAX_JOBS"] = str(max(1, -(-busy * 3 // (2 * workers))))
    try:
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for work in [pool.submit(build, module, spec) for module, spec in sources]:
                work.result()
    finally:
        if before is None:
            del os.environ["MAX_JOBS"]
        else:
            os.environ["MAX_JOBS"] = before
    return lacking
