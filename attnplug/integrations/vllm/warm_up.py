"""Runs each kind of step of vLLM's layers once, so that no request waits for the compilation of kernels."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import torch

from attnplug.core.interface.answers import answer
from attnplug.core.metadata import PAD_SLOT_ID
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.runtime.steps.dummy_steps import DummyShape, dummy_step, shapes_within

if TYPE_CHECKING:
    from attnplug.integrations.vllm.builder import Builder

_log = logging.getLogger("attnplug")


def warm_up(builder: Builder) -> None:
    """Run dummy steps on vLLM's own pages for one layer of each kind that compiles kernels.

    The shapes are those of `AttentionRuntime.warm_up`. Nothing is written: slots are -1, and tables have the null block.
    """
    began, count = time.perf_counter(), 0
    for number, bound in builder.kinds().items():
        spec = bound.decision.spec
        found = next(
            (layer for layer in builder.layers.values() if builder.seen(layer.impl, True)[1] == number), None
        )
        pages = getattr(found, "kv_cache", None)
        # Encoders and cross attention have no graphs, which are what a warm-up comes before.
        if found is None or not isinstance(pages, torch.Tensor) or not pages.numel() or spec.direct_kv:
            continue
        if spec.attn_type is not AttentionType.DECODER or answer(bound.backend, "compile_key", spec) is None:
            continue
        inner, view = builder.inner(bound), found.impl.view_of(pages)
        for shape in shapes_within(inner.config, is_paged=True):
            _run(builder, bound.inner, inner, spec, shape, found, view)
            count += 1
    if count:
        _log.info("%d dummy steps before vLLM's graphs took %.1f s", count, time.perf_counter() - began)


def _run(
    owner: Builder,
    impl: Any,
    builder: Any,
    spec: LayerSpec,
    shape: DummyShape,
    layer: Any,
    view: torch.Tensor,
) -> None:
    rows, device = shape.requests * shape.query_len, view.device
    width = -(-(shape.computed + shape.query_len) // view.shape[2])
    table = torch.zeros(shape.requests, width, dtype=torch.int32, device=device)
    slots = torch.full((rows,), PAD_SLOT_ID, dtype=torch.int64, device=device)
    common = owner.with_spans(dummy_step(shape, table, slots), spec).for_layers((spec,))
    query, key, value, output = (
        torch.zeros(rows, heads, size, dtype=getattr(torch, spec.dtype), device=device)
        for heads, size in (
            (spec.num_heads, spec.head_size),
            (spec.num_kv_heads, spec.head_size),
            (spec.num_kv_heads, spec.head_size_v),
            (spec.num_heads, spec.head_size_v),
        )
    )
    impl.update_kv_cache(layer, key, value, view, slots)
    impl.attend(layer, query, key, value, view, builder.build(0, common), output)
