"""Latent attention on a GPU: absorbed queries have the numbers of expanded ones, and graphs and hosts do as they must."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import attnplug
from attnplug.backends.torch_native import TorchBackend
from attnplug.backends.triton.backend import TritonBackend, TritonMLABackend
from attnplug.core import BuilderConfig, LayerSpec, MLADims, Phase, QueryLens, SparseSpec
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.testing import assert_close, paged_batch, run_batch, tolerance
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default", "error:::attnplug")]

DEVICE = "cuda"
HEADS = [1, 4, 12, 16, 20, 64, 128]
RANKS = [(512, 64), (256, 64), (512, 0), (256, 32)]


def layer(heads: int, rank: int = 512, rope: int = 64, **fields: Any) -> LayerSpec:
    dims = MLADims(
        q_lora_rank=None, kv_lora_rank=rank, qk_nope_head_dim=128, qk_rope_head_dim=rope, v_head_dim=128
    )
    told = {"dtype": "bfloat16", "needs_lse": True, "num_kv_heads": 1, "head_size": rank + rope, "mla": dims}
    return LayerSpec(num_heads=heads, **{**told, **fields})


def decoder(name: str, spec: LayerSpec, prefill: Any) -> Any:
    """The decoding half of a backend with `prefill`; skipped, with the reasons, where it does not serve the layer."""
    decision = attnplug.explain(spec, DEVICE, Phase.DECODE, backend=name)
    if decision.backend is None:
        pytest.skip("; ".join(str(reason) for each in decision.refused for reason in each.reasons)[:200])
    found = attnplug.list_backends()[name].for_layer(spec)
    return found if spec.sparse else found.with_prefill(prefill.for_layer(spec.expanded()))  # type: ignore[attr-defined]


def expanding(backend: Any) -> Any:
    """The same backend, which here prefills every request of more than one query."""
    return type("Expanding", (backend,), {"query_lens": QueryLens.SINGLE, "decode_threshold": 1})


def answer(backend: Any, batch: Batch, **config: Any) -> Output:
    found = Output(*run_batch(backend, batch, **config))
    assert difference(batch, found) is None
    return found


@pytest.mark.parametrize("name", ["TRITON", "FLASHINFER"])
@pytest.mark.parametrize(("rank", "rope"), RANKS)
@pytest.mark.parametrize("heads", HEADS)
def test_absorbed_is_expanded(name: str, heads: int, rank: int, rope: int) -> None:
    spec = layer(heads, rank, rope)
    backend = decoder(name, spec, TritonBackend)
    batch = paged_batch(spec, [3, 5, 2], [400, 5, 70], block_size=16, device=DEVICE)
    absorbed, expanded = answer(backend, batch), answer(expanding(backend), batch)
    # Each may be that far from the oracle.
    bound = tolerance(spec)
    assert_close(absorbed.output, expanded.output, 2 * bound.output)
    assert absorbed.lse is not None
    assert expanded.lse is not None
    assert (absorbed.lse - expanded.lse).abs().max() <= 2 * bound.lse


@pytest.mark.parametrize("name", ["TRITON", "FLASHINFER"])
@pytest.mark.parametrize("block_size", [1, 16, 64, 128, 256])
@pytest.mark.parametrize(
    ("new", "tokens"),
    [
        ([1] * 5, [1, 64, 65, 1000, 4097]),
        ([4] * 3, [900, 4, 333]),
        ([0, 3, 0, 8, 1, 0], [70, 600, 0, 131, 9, 64]),
        ([2, 5, 3], [700, 3, 0]),
    ],
    ids=["single", "drafts", "ragged", "padding"],
)
def test_pages_and_drafts(name: str, block_size: int, new: list[int], tokens: list[int]) -> None:
    spec = layer(20)
    batch = paged_batch(spec, new, tokens, block_size=block_size, padding=3, skip_blocks=2, device=DEVICE)
    answer(decoder(name, spec, TritonBackend), batch)


@pytest.mark.parametrize("name", ["TRITON", "FLASHINFER"])
@pytest.mark.parametrize("heads", [16, 128])
def test_pages_between_those_of_other_layers(name: str, heads: int) -> None:
    spec = layer(heads)
    backend = decoder(name, spec, TorchBackend)
    batch = paged_batch(spec, [1, 4, 2], [300, 64, 1000], block_size=64, device=DEVICE)
    cache = batch.kv_cache
    among = cache.new_full((cache.shape[0], 3, *cache.shape[1:]), torch.nan)
    among[:, 1] = cache
    answer(backend, dataclasses.replace(batch, kv_cache=among[:, 1]))
    wide = cache.new_full((*cache.shape[:2], 640), torch.nan)
    wide[..., :576] = cache
    answer(backend, dataclasses.replace(batch, kv_cache=wide[..., :576]))


@pytest.mark.parametrize("stored", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("new", [[1, 1, 1], [4, 4, 4], [8, 1, 3]], ids=["single", "uniform", "any"])
def test_latents_of_8_bits(stored: str, heads: int, new: list[int]) -> None:
    spec = layer(heads, kv_cache_dtype=stored)
    batch = paged_batch(spec, new, [4000, 9, 65], block_size=64, k_scale=0.37, device=DEVICE)
    answer(decoder("TRITON", spec, TritonBackend), batch)


@pytest.mark.parametrize("rows", [1 << 15, 4096, 1000])
def test_a_context_in_chunks(rows: int) -> None:
    spec = layer(16)
    batch = paged_batch(spec, [40, 1, 30], [9000, 64, 5000], block_size=16, device=DEVICE)
    whole = answer(decoder("TRITON", spec, TritonBackend), batch, context_chunk_rows=1 << 15)
    cut = answer(decoder("TRITON", spec, TritonBackend), batch, context_chunk_rows=rows)
    assert_close(cut.output, whole.output, 2 * tolerance(spec).output)


@pytest.mark.parametrize("topk", [1, 64, 2048])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("stored", ["auto", "fp8_e4m3"])
def test_chosen_keys(topk: int, heads: int, stored: str) -> None:
    spec = layer(heads, sparse=SparseSpec("token_topk", topk), kv_cache_dtype=stored)
    scales = {"k_scale": 0.37, "v_scale": 0.37} if spec.has_quantized_kv_cache else {}
    batch = paged_batch(spec, [1, 0, 3, 12], [5000, 9, 40, 12], block_size=64, device=DEVICE, **scales)
    answer(decoder("TRITON", spec, None), batch)


def serving(spec: LayerSpec, batch: Batch, **config: Any) -> tuple[Any, Any]:
    backend = TritonMLABackend.for_layer(spec)
    impl = backend.get_impl_cls().from_spec(spec, backend=backend, layer_name="0", tensors=batch.tensors)
    layers: Any = {"0": types.SimpleNamespace(impl=impl)}
    pages: Any = kv_cache_spec_for(spec, 64)
    settings = BuilderConfig(layers=layers, **config)
    return impl, backend.get_builder_cls()(pages, ["0"], settings, torch.device(DEVICE))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("sparse", [None, SparseSpec("token_topk", 700)], ids=["dense", "sparse"])
def test_a_replay_reads_the_lengths_of_its_step(
    heads: int, query_len: int, sparse: SparseSpec | None
) -> None:
    spec, new = layer(heads, needs_lse=False, sparse=sparse), [query_len] * 8
    batch = paged_batch(spec, new, [3000] * 8, block_size=64, device=DEVICE)
    impl, builder = serving(spec, batch, num_speculative_tokens=query_len - 1)
    common = batch.common
    names = "seq_lens", "block_table_tensor", "slot_mapping"
    own = dataclasses.replace(common, **{name: getattr(common, name).clone() for name in names})
    chosen = own.selection
    query, key, cache = batch.query.clone(), batch.key.clone(), batch.kv_cache.clone()
    output = torch.empty(len(query), heads, 128, dtype=query.dtype, device=DEVICE)
    metadata = builder.build_for_cudagraph_capture(own)
    impl.forward(None, query, key, None, cache, metadata, output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        impl.forward(None, query, key, None, cache, metadata, output)
    for seed, tokens in enumerate(([7, 2999] * 4, [100] * 8, [2000, 5, 33, 64, 65, 1024, 4, 2048])):
        step = paged_batch(spec, new, tokens, block_size=64, seed=seed, device=DEVICE)
        blocks, width = len(step.kv_cache), step.common.block_table_tensor.shape[1]
        cache[:blocks].copy_(step.kv_cache)
        query.copy_(step.query)
        key.copy_(step.key)
        own.seq_lens.copy_(step.common.seq_lens)
        own.block_table_tensor[:, :width].copy_(step.common.block_table_tensor)
        own.slot_mapping.copy_(step.common.slot_mapping)
        if chosen is not None and step.common.selection is not None:
            chosen.copy_from(step.common.selection)
        builder.build(0, dataclasses.replace(own, seq_lens_host=step.common.seq_lens_host))
        graph.replay()
        expected = dataclasses.replace(step, tensors=batch.tensors)
        assert difference(expected, Output(output, None)) is None


@pytest.mark.parametrize("query_len", [1, 4, 100])
def test_a_step_waits_for_nothing(query_len: int) -> None:
    spec = layer(16, needs_lse=False)
    batch = paged_batch(spec, [query_len] * 8, [2000] * 8, block_size=64, device=DEVICE)
    impl, builder = serving(spec, batch)
    output = torch.empty(len(batch.query), 16, 128, dtype=batch.query.dtype, device=DEVICE)
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
