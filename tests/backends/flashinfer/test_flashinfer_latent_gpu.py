"""FLASHINFER decodes latents on a GPU.

The order of a first run: `test_numbers` compiles one module per dtype (30 to 100 s each) and tries heads, query
lengths and pages; `test_conformance` is the kit; `test_a_replay_reads_the_plan_of_its_step` captures a graph;
`test_a_step_waits_for_nothing` raises at the first synchronisation. Then `benchmarks/mla.py` compares with the library
called directly, and `get_priority` of FlashInferMLABackend gets the measured rank.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch

from attnplug.backends.flashinfer import FlashInferBackend
from attnplug.backends.torch_native import TorchBackend
from attnplug.core import BuilderConfig, LayerSpec, MLADims
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.registry.plugins.installed import missing_requirements
from attnplug.testing import paged_batch, parametrize_with_checks, run_batch
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference

LACKING = missing_requirements(FlashInferBackend.requires)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(LACKING), reason=", ".join(map(str, LACKING))),
    # What the library warns of when it compiles is none of attnplug's warnings.
    pytest.mark.filterwarnings("default", "error:::attnplug"),
]

DIMS = MLADims(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


def layer(heads: int = 16, **fields: Any) -> LayerSpec:
    return LayerSpec(**{"num_heads": heads, "num_kv_heads": 1, "head_size": 576, "mla": DIMS} | fields)


BOTH: Any = FlashInferBackend.for_layer(layer()).with_prefill(TorchBackend)  # type: ignore[attr-defined]


@parametrize_with_checks(FlashInferBackend)
def test_conformance(check):
    if not check.id.startswith("mla"):
        pytest.skip("test_flashinfer_gpu.py has it")
    check()


@pytest.mark.parametrize("heads", [1, 4, 12, 16, 20, 64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("new", [[1, 1, 1], [4, 4, 4], [8, 1, 3]], ids=["single", "uniform", "any"])
def test_numbers(heads: int, dtype: str, page: int, new: list[int]) -> None:
    spec = layer(heads, dtype=dtype, needs_lse=True)
    batch = paged_batch(spec, new, [4000, 9, 65], block_size=page, padding=2, device="cuda")
    assert difference(batch, Output(*run_batch(BOTH, batch))) is None


def serving(spec: LayerSpec, batch: Batch, **config: Any) -> tuple[Any, Any]:
    impl = BOTH.get_impl_cls().from_spec(spec, backend=BOTH, layer_name="0", tensors=batch.tensors)
    layers = {"0": types.SimpleNamespace(impl=impl)}
    cache: Any = kv_cache_spec_for(spec, 16)
    settings = BuilderConfig(layers=layers, **config)
    return impl, BOTH.get_builder_cls()(cache, ["0"], settings, torch.device("cuda"))


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_replay_reads_the_plan_of_its_step(query_len: int) -> None:
    spec, new = layer(), [query_len] * 8
    batch = paged_batch(spec, new, [3000] * 8, block_size=16, device="cuda")
    impl, builder = serving(spec, batch, num_speculative_tokens=query_len - 1)
    query, cache, key = batch.query.clone(), batch.kv_cache.clone(), batch.key.clone()
    output = torch.empty(query.shape[0], 16, 128, dtype=query.dtype, device="cuda")
    slots = batch.common.slot_mapping.clone()
    metadata = builder.build_for_cudagraph_capture(batch.common)
    captured = dataclasses.replace(metadata, slot_mapping=slots)
    impl.forward(None, query, key, None, cache, captured, output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        impl.forward(None, query, key, None, cache, captured, output)
    for seed, tokens in enumerate(([7, 2999] * 4, [100] * 8, [2000, 5, 33, 16, 17, 1024, 3, 2048])):
        step = paged_batch(spec, new, tokens, block_size=16, seed=seed, device="cuda")
        blocks = min(len(step.kv_cache), len(cache))
        assert len(step.kv_cache) <= len(cache)
        cache[:blocks].copy_(step.kv_cache[:blocks])
        query.copy_(step.query)
        key.copy_(step.key)
        slots.copy_(step.common.slot_mapping)
        builder.build(0, step.common)
        graph.replay()
        expected = dataclasses.replace(step, tensors=batch.tensors)
        assert difference(expected, Output(output, None)) is None


def test_a_step_waits_for_nothing() -> None:
    spec = layer(128)
    batch = paged_batch(spec, [1] * 32, [2000] * 32, block_size=16, device="cuda")
    impl, builder = serving(spec, batch)
    output = torch.empty(32, 128, 128, dtype=batch.query.dtype, device="cuda")
    run = (None, batch.query, batch.key, None, batch.kv_cache)
    for _ in range(3):
        impl.forward(*run, builder.build(0, batch.common), output)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        impl.forward(*run, builder.build(0, batch.common), output)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert difference(batch, Output(output, None)) is None
