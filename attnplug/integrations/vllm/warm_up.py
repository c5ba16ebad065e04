"""Runs each kind of step of vLLM's layers once, so that no request waits for the compilation of kernels."""

from __future__ import annotations

import functools
import logging
import time
from typing import TYPE_CHECKING

import torch

from attnplug.integrations.first_steps import compiles, run_first_steps
from attnplug.integrations.vllm.rank_layers import RankImpl

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
            spec, view = bound.decision.spec, found.impl.view_of(pages)
            completed = functools.partial(builder.with_spans, spec=spec)
            impl, inner = bound.inner, builder.inner(bound)
            if isinstance(impl, RankImpl):
                # The keys of one rank, without an exchange.
                impl, inner = impl.pages, inner.pages
            count += run_first_steps(bound.backend, impl, inner, spec, found, view, completed)
    if count:
        _log.info("%d dummy steps before vLLM's graphs took %.1f s", count, time.perf_counter() - began)
