"""Runs one layer of one batch on a backend, with outputs filled with NaN first."""

from __future__ import annotations

import types
from typing import Any

import torch

from attnplug.core.backend import AttentionBackend
from attnplug.core.config import BuilderConfig
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from batches import Batch

__all__ = ["run_batch"]


def run_batch(
    backend: type[AttentionBackend], batch: Batch, *, use_sinks: bool = True, layer: Any = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Build the metadata, write the cache and attend.

    Returns:
        Output `[T + padding, H, Dv]` and, if the spec needs it, LSE `[T + padding, H]`. Rows that the backend
        did not write are NaN.
    """
    spec, device = batch.spec, batch.query.device
    block_size = 1 if batch.kv_cache is None else backend.split_kv(batch.kv_cache, spec)[0].shape[1]
    cache_spec: Any = kv_cache_spec_for(spec, block_size)
    options = None if backend.Options is None else backend.Options()
    impl = backend.get_impl_cls().from_spec(spec, layer_name="layer", tensors=batch.tensors, options=options)
    # Builders that plan read the features to plan for from the impl of their layers.
    planned: Any = types.SimpleNamespace(impl=impl)
    builder = backend.get_builder_cls()(
        cache_spec, ["layer"], BuilderConfig(layers={"layer": planned}), device
    )
    rows = batch.query.shape[0]
    output = batch.query.new_full((rows, spec.num_heads, spec.head_size_v), torch.nan)
    lse = torch.full((rows, spec.num_heads), torch.nan, device=device) if spec.needs_lse else None
    inputs = (batch.query, batch.key, batch.value, batch.kv_cache)
    impl.forward(layer, *inputs, builder.build(0, batch.common), output, output_lse=lse, use_sinks=use_sinks)
    return output, lse
