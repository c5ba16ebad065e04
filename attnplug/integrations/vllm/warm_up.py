"""Runs each kind of step of vLLM's layers once, so that no request waits for the compilation of kernels."""

from __future__ import annotations

import functools
import logging
import time
from typing import TYPE_CHECKING

import torch

from attnplug.integrations.first_steps import compiles, run_first_steps

if TYPE_CHECKING:
    from attnplug.integrations.vllm.builder import Builder

_log = logging.getLogger("attnplug")


def warm_up(builder: Builder) -> None:
    """Run the first steps of one layer of each kind that compiles kernels, on vLLM's own pages."""
    began, count = time.perf_counter(), 0
    for number, bound in builder.kinds().items():
        found = next(
            (layer for layer in builder.layers.values() if builder.seen(layer.impl, True)[1] == number), None
        )
        pages = getattr(found, "kv_cache", None)
        if found is None or not isinstance(pages, torch.Tensor) or not pages.numel():
            continue
        if compiles(bound.decision):
            if bound.picked is not None:
                # No indexer has filled it, and positions past a table would be read there.
                bound.picked.fill_(-1)
                bound.picked[:, 0] = 0
            view, completed = found.impl.view_of(pages), functools.partial(builder.completed, bound=bound)
            # Where ranks share tokens, all of them run the same steps now, and exchange their parts.
            inner = builder.inner(bound)
            count += run_first_steps(bound.backend, bound.inner, inner, bound.spec, found, view, completed)
    if count:
        _log.info("%d dummy steps before vLLM's graphs took %.1f s", count, time.perf_counter() - began)
