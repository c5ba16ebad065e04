"""Kernels that begin before the one before them ends, on a GPU: each must see what that one wrote.

Many layers share pages and scratch memory. Their results in one graph have the bits of those with a wait after each kernel.
"""

from __future__ import annotations

import types

import pytest
import torch

pytest.importorskip("triton")

from attnplug.backends.triton import TritonBackend
from attnplug.core import BuilderConfig, LayerSpec, MLADims
from attnplug.core.impl import AttentionImpl
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.ops.triton.launch import can_overlap
from attnplug.testing import paged_batch
from attnplug.testing.conformance.harness import make_impl

pytestmark = pytest.mark.gpu

LAYERS = 12
STEPS = {
    "decodes": ([1] * 40, [700 + 61 * each for each in range(40)]),
    "one decode": ([1], [9000]),
    "drafts": ([3] * 20, [400 + 33 * each for each in range(20)]),
    "decodes and a prompt": ([1] * 24 + [512], [2000 + each for each in range(24)] + [512]),
    "decodes and more of a prompt": ([1] * 8 + [1200], [5000] * 8 + [4000]),
    "a prompt": ([700], [700]),
}


@pytest.mark.parametrize("stored", ["auto", "fp8_e4m3", "int8_token_head", "nvfp4", "rotated4"])
@pytest.mark.parametrize("step", STEPS)
def test_a_graph_of_layers_has_the_bits_of_layers_one_after_another(step: str, stored: str) -> None:
    heads = {"num_heads": 16, "num_kv_heads": 4, "head_size": 128}
    check(LayerSpec(**heads, dtype="bfloat16", kv_cache_dtype=stored, block_size=64), step)


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("step", ["decodes", "one decode", "drafts"])
def test_so_has_a_graph_of_latents(step: str, heads: int) -> None:
    dims = MLADims(
        q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    sizes = {"num_heads": heads, "num_kv_heads": 1, "head_size": dims.latent_size, "mla": dims}
    check(LayerSpec(**sizes, dtype="bfloat16", block_size=64), step)


def check(spec: LayerSpec, step: str) -> None:
    backend = TritonBackend.for_layer(spec)
    device = torch.device("cuda", torch.cuda.current_device())
    if not can_overlap(device):
        pytest.skip("the GPU starts no kernel before the one before it has ended")
    batch = paged_batch(spec, *STEPS[step], device="cuda", backend=backend)
    tokens = len(batch.query)
    generator = torch.Generator("cuda").manual_seed(3)

    def drawn(like: torch.Tensor) -> torch.Tensor:
        made = torch.randn((LAYERS, *like.shape), device="cuda", generator=generator)
        return made.to(like.dtype)

    query, key = drawn(batch.query), drawn(batch.key)
    value = [None] * LAYERS if batch.value is None else drawn(batch.value)
    # Each new token sees itself most, so that pages of the layer before would give other numbers.
    if spec.mla is None:
        query[:, :, ::4] = key * 2
    impl = make_impl(backend, spec, batch.tensors)
    config = BuilderConfig(layers={"layer": types.SimpleNamespace(impl=impl)})
    builder = backend.get_builder_cls()(kv_cache_spec_for(spec, 64), ["layer"], config, device)
    metadata = builder.build(0, batch.common)
    found, apart = (query.new_zeros(*query.shape[:3], spec.output_size) for _ in range(2))
    for index in range(LAYERS):
        given = query[index], key[index], value[index], batch.kv_cache
        written = key[index, ..., : spec.head_size_v] if value[index] is None else value[index]
        impl.update_kv_cache(None, key[index], written, batch.kv_cache, metadata.slot_mapping)
        torch.cuda.synchronize()
        impl.attend(None, *given, metadata, apart[index])
        torch.cuda.synchronize()

    def run(impl: AttentionImpl) -> None:
        for index in range(LAYERS):
            given = query[index], key[index], value[index], batch.kv_cache
            impl.forward(None, *given, metadata, found[index])

    run(impl)
    torch.cuda.synchronize()
    assert torch.equal(found[:, :tokens], apart[:, :tokens])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(impl)
    for _ in range(20):
        found.zero_()
        graph.replay()
        assert torch.equal(found[:, :tokens], apart[:, :tokens])
