"""Runs each kind of step of SGLang's layers once, so that no request waits for the compilation of kernels."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from attnplug.integrations.first_steps import compiles, run_first_steps

if TYPE_CHECKING:
    from attnplug.integrations.sglang.backend import Backend

_log = logging.getLogger("attnplug")


def warm_up(backend: Backend) -> int:
    """Run the first steps of one layer of each kind that compiles kernels, on SGLang's pages; gives their number.

    Sinks come with a call, so layers that have some are met by requests first.
    """
    began, count, met = time.perf_counter(), 0, set[object]()
    for layer in backend.attention_layers():
        bound = backend.bound(layer, None)
        pages = bound.pages()
        if bound.kind in met or pages is None or not compiles(bound.decision):
            continue
        met.add(bound.kind)
        builder = backend.builder_of(bound)
        count += run_first_steps(
            bound.decision.get_backend_cls(), bound.impl, builder, bound.spec, None, pages
        )
    if count:
        _log.info("%d dummy steps before SGLang's graphs took %.1f s", count, time.perf_counter() - began)
    return count
