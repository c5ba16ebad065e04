"""Graphs of shared steps and of trees on a GPU: replays give what plain steps give."""

from __future__ import annotations

import random

import pytest
import torch

import attnplug
from attnplug.core import BuilderConfig, LayerSpec
from attnplug.runtime import AttentionRuntime, GraphState, SharedGraph, SharedGraphs, SharingPrices

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LONGEST, SIZE, REQUESTS = 4096, 16, 8
LAYERS = {
    "full": LayerSpec(num_heads=8, num_kv_heads=2, head_size=128),
    "capped": LayerSpec(num_heads=8, num_kv_heads=2, head_size=128, logits_soft_cap=20.0),
    "fp8": LayerSpec(num_heads=8, num_kv_heads=2, head_size=128, kv_cache_dtype="fp8_e4m3"),
}


def runtimes(spec: LayerSpec) -> tuple[AttentionRuntime, AttentionRuntime]:
    """Two over the same pages: one shares all that it can, and one nothing."""
    plan = attnplug.plan({"0": spec}, "cuda", num_blocks=4096, backend="TRITON")
    config = BuilderConfig(
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=128,
        max_model_len=LONGEST,
        cudagraph_batch_sizes=(REQUESTS,),
    )
    shares = AttentionRuntime(plan, config=config, debug=False, prefix_sharing=SharingPrices.free())
    for cache in shares.kv_caches.values():
        cache.copy_(torch.randn(cache.shape, device="cuda").to(cache.dtype))
    pages = dict(shares.kv_caches)
    plain = AttentionRuntime(plan, config=config, debug=False, prefix_sharing=False, kv_caches=pages)
    return shares, plain


def drawn(spec: LayerSpec, rows: int) -> list[torch.Tensor]:
    heads = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
    return [torch.randn(rows, each, spec.head_size, device="cuda", dtype=torch.bfloat16) for each in heads]


@pytest.mark.parametrize("kind", LAYERS)
def test_replays_of_one_graph_serve_any_forest(kind: str) -> None:
    spec, rng = LAYERS[kind], random.Random(0)
    shares, plain = runtimes(spec)
    graphs = SharedGraphs(shares, GraphState(shares))
    given, graph = drawn(spec, REQUESTS), torch.cuda.CUDAGraph()
    with graphs.capture(REQUESTS):
        shares.forward("0", *given)
        with torch.cuda.graph(graph):
            output = shares.forward("0", *given)
    shared = 0
    for _ in range(12):
        both = [runtime.step_batch_builder() for runtime in (shares, plain)]
        blocks = list(range(1, 4096))
        rng.shuffle(blocks)
        stems = [[blocks.pop() for _ in range(rng.randint(1, 100))] for _ in range(2)]
        stems.append([*stems[0][: len(stems[0]) // 2], *(blocks.pop() for _ in range(20))])
        for number in range(rng.randint(2, REQUESTS)):
            stem = rng.choice(stems)
            computed = len(stem) * SIZE + rng.randrange(300)
            held = [*stem, *(blocks.pop() for _ in range(computed // SIZE + 1 - len(stem)))]
            for builder in both:
                builder.add_request(str(number), [held], computed)
        batches = [builder.step(1) for builder in both]
        key = graphs.prepare(batches[0])
        count = batches[0].common.num_actual_tokens
        if key is None:
            continue
        shared += 1
        for each in given:
            each.normal_()
        graph.replay()
        plain.begin_step(batches[1])
        expected = plain.forward("0", *given)
        torch.testing.assert_close(output[:count], expected[:count], rtol=2e-2, atol=4e-3)
    assert shared >= 5


@pytest.mark.parametrize("kind", LAYERS)
def test_replays_of_one_graph_verify_trees(kind: str) -> None:
    spec, rng = LAYERS[kind], random.Random(1)
    parents = [-1, 0, 0, 1, 2, 2, 5]
    shares, _ = runtimes(spec)
    state = GraphState(shares, max_query_len=len(parents))
    graphs, rows = SharedGraphs(shares, state), REQUESTS * len(parents)
    given, graph = drawn(spec, rows), torch.cuda.CUDAGraph()
    with graphs.capture(REQUESTS, parents):
        shares.forward("0", *given)
        with torch.cuda.graph(graph):
            output = shares.forward("0", *given)
    for _ in range(5):
        builder = shares.step_batch_builder()
        blocks = list(range(1, 4096))
        rng.shuffle(blocks)
        names = [str(number) for number in range(rng.randint(1, REQUESTS))]
        for name in names:
            computed = rng.randrange(1, 3000)
            held = [blocks.pop() for _ in range((computed + len(parents)) // SIZE + 1)]
            builder.add_request(name, [held], computed)
        batch = builder.step(len(parents), trees=dict.fromkeys(names, tuple(parents)))
        for each in given:
            each.normal_()
        assert graphs.prepare(batch) == SharedGraph(REQUESTS, tuple(parents))
        graph.replay()
        count = batch.common.num_actual_tokens
        found = output[:count].clone()
        shares.begin_step(batch)
        expected = shares.forward("0", *given)
        torch.testing.assert_close(found, expected[:count], rtol=2e-2, atol=4e-3)


def test_replays_follow_decodes_of_the_same_requests() -> None:
    """The graph's memory is right after new blocks, steps without the graph, and a request that ends."""
    spec = LAYERS["full"]
    shares, plain = runtimes(spec)
    graphs = SharedGraphs(shares, GraphState(shares))
    given, graph = drawn(spec, REQUESTS), torch.cuda.CUDAGraph()
    with graphs.capture(REQUESTS):
        shares.forward("0", *given)
        with torch.cuda.graph(graph):
            output = shares.forward("0", *given)
    both, blocks = [runtime.step_batch_builder() for runtime in (shares, plain)], iter(range(1, 4096))
    stem = [next(blocks) for _ in range(20)]
    computed = {str(number): 20 * SIZE + number for number in range(REQUESTS)}
    for name, tokens in computed.items():
        held = [*stem, next(blocks)]
        for builder in both:
            builder.add_request(name, [held], tokens)
    for step in range(40):
        if step == 25:
            del computed["3"]
            for builder in both:
                builder.remove_request("3")
        for name in [name for name, tokens in computed.items() if tokens % SIZE == 0 and step]:
            new = [next(blocks)]
            for builder in both:
                builder.append_blocks(name, [new])
        for each in given:
            each.normal_()
        batch, other = (builder.step(1) for builder in both)
        plain.begin_step(other)
        expected = plain.forward("0", *given)
        if step % 7 == 3:
            shares.begin_step(batch)
            shares.forward("0", *given)
        assert graphs.prepare(batch) == SharedGraph(REQUESTS)
        graph.replay()
        count = batch.common.num_actual_tokens
        torch.testing.assert_close(output[:count], expected[:count], rtol=2e-2, atol=4e-3)
        for builder in both:
            builder.finish_step()
        computed = {name: tokens + 1 for name, tokens in computed.items()}
