"""Builders of FLASHINFER for layers by name, batches for them, and what they planned."""

from __future__ import annotations

import types
from typing import Any

import torch
from flashinfer_on_cpu import FlashInferOnCpu

from attnplug.backends.flashinfer.builder import FlashInferMetadataBuilder
from attnplug.backends.flashinfer.groups import PlanGroup
from attnplug.backends.flashinfer.impl import FlashInferImpl
from attnplug.backends.flashinfer.metadata import FlashInferMetadata
from attnplug.backends.flashinfer.options import Options
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.testing import Batch, assert_close, layer_tensors, paged_batch, tolerance

CPU = torch.device("cpu")
PAGE = 4


def layer(**fields: Any) -> LayerSpec:
    return LayerSpec(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "dtype": "float16", **fields})


def builder_of(
    specs: dict[str, LayerSpec],
    backend: type[FlashInferOnCpu] = FlashInferOnCpu,
    options: Options | None = None,
    **config: Any,
) -> FlashInferMetadataBuilder:
    made = {}
    for name, spec in specs.items():
        impl = FlashInferImpl.from_spec(
            spec,
            backend=backend,
            layer_name=name,
            tensors=layer_tensors(spec),
            options=options or backend.Options(),
        )
        made[name] = types.SimpleNamespace(impl=impl)
    cache: Any = kv_cache_spec_for(next(iter(specs.values())), PAGE)
    return backend.get_builder_cls()(cache, list(specs), BuilderConfig(layers=made, **config), CPU)


def common_of(new: list[int], tokens: list[int], seed: int = 0) -> CommonAttentionMetadata:
    return paged_batch(layer(), new, tokens, block_size=PAGE, seed=seed).common


def wrappers(metadata: FlashInferMetadata, group: PlanGroup) -> list[Any]:
    return [each._wrapper for _, each in metadata.planned(group).parts]


def costs(builder: FlashInferMetadataBuilder) -> list[tuple[int, int]]:
    return [(cost.plans, cost.skipped) for cost in builder.plan_costs.values()]


def run(
    builder: FlashInferMetadataBuilder,
    batch: Batch,
    metadata: FlashInferMetadata | None = None,
    name: str = "0",
) -> None:
    """The batch through the builder's layer, against the oracle."""
    impl = builder.config.layers[name].impl
    output = torch.full((batch.query.shape[0], 4, 64), torch.nan, dtype=torch.float16)
    metadata = builder.build(0, batch.common) if metadata is None else metadata
    impl.forward(None, batch.query, batch.key, batch.value, batch.kv_cache, metadata, output)
    assert_close(output, batch.oracle().output, tolerance(batch.spec).output)
