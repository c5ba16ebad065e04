"""Runs each kind of step of an engine's layer once, so that no request waits for the compilation of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.interface.answers import answer
from attnplug.core.metadata import PAD_SLOT_ID, AttentionMetadataBuilder, CommonAttentionMetadata
from attnplug.core.spec import AttentionType, LayerSpec
from attnplug.mla.chunks import long_context
from attnplug.registry.selection.decision import Decision
from attnplug.runtime.steps.dummy_steps import DummyShape, dummy_step, dummy_tensors, shapes_within


def compiles(decision: Decision) -> bool:
    """Whether a decoder layer's backend compiles kernels. Encoders and cross attention run outside of graphs."""
    spec = decision.spec
    if spec.direct_kv or spec.attn_type is not AttentionType.DECODER:
        return False
    return answer(decision.get_backend_cls(), "compile_key", spec) is not None


def run_first_steps(
    backend: type[AttentionBackend],
    impl: Any,
    builder: AttentionMetadataBuilder[Any],
    spec: LayerSpec,
    layer: Any,
    pages: torch.Tensor,
    completed: Callable[[CommonAttentionMetadata], CommonAttentionMetadata] = lambda common: common,
) -> int:
    """Run the steps of `AttentionRuntime.warm_up` on the engine's pages, and give their number.

    Nothing is written: slots are -1, and tables have block 0.

    Args:
        backend: of the layer.
        impl: of it.
        builder: of its metadata.
        spec: the layer.
        layer: as the impl's calls take it; None if they take none.
        pages: the layer's cache in its logical shape.
        completed: adds to a step what the engine gives its layers.
    """
    context = long_context(spec, builder.config.context_chunk_rows)
    shapes = list(shapes_within(builder.config, backend, is_paged=True, context=context))
    for shape in shapes:
        _run(impl, builder, spec, shape, layer, pages, completed)
    return len(shapes)


def _run(
    impl: Any,
    builder: AttentionMetadataBuilder[Any],
    spec: LayerSpec,
    shape: DummyShape,
    layer: Any,
    pages: torch.Tensor,
    completed: Callable[[CommonAttentionMetadata], CommonAttentionMetadata],
) -> None:
    rows, device = shape.requests * shape.query_len, pages.device
    # Pages of latents have no dimension for keys and values.
    block_size = pages.shape[2 if spec.mla is None else 1]
    width = -(-(shape.computed + shape.query_len) // block_size)
    table = torch.zeros(shape.requests, width, dtype=torch.int32, device=device)
    slots = torch.full((rows,), PAD_SLOT_ID, dtype=torch.int64, device=device)
    common = completed(dummy_step(shape, table, slots)).for_layers((spec,))
    given = dummy_tensors(spec, rows, device)
    query, key, value = given["query"], given["key"], given.get("value")
    output = query.new_zeros(rows, spec.num_heads, spec.output_size)
    impl.update_kv_cache(layer, key, key if value is None else value, pages, slots)
    impl.attend(layer, query, key, value, pages, builder.build(0, common), output)
