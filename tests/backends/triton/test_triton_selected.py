"""Sparse layers of latents on TRITON: one plan serves all layers of a step, whatever keys each of them chooses."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attnplug.backends.triton import TritonBackend, latent
from attnplug.backends.triton.launch import Gpu
from attnplug.backends.triton.share_launch import ShareLaunch
from attnplug.core import BuilderConfig, LayerSpec, MLADims, Selection, SparseSpec
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.mla import selected
from attnplug.ops.triton import selection as kernels
from attnplug.ops.triton.launch import BoundKernel
from attnplug.testing import paged_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, RANK, ROPE = 2, 16, 16
DIMS = MLADims(q_lora_rank=None, kv_lora_rank=RANK, qk_nope_head_dim=16, qk_rope_head_dim=ROPE, v_head_dim=16)
TOPK = 100
SPEC = LayerSpec(
    num_heads=HEADS,
    num_kv_heads=1,
    head_size=RANK + ROPE,
    mla=DIMS,
    dtype="float32",
    sparse=SparseSpec("token_topk", TOPK),
)

Launch = tuple[BoundKernel, tuple[int, ...], tuple[Any, ...]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches of this test; tables are written by their kernel on a CPU too."""
    made: list[Launch] = []
    launch = BoundKernel.__call__

    def call(kernel: BoundKernel, grid: tuple[int, ...], *given: Any) -> None:
        made.append((kernel, grid, given))
        launch(kernel, grid, *given)

    monkeypatch.setattr(BoundKernel, "__call__", call)
    for name in ("table_of_tokens", "query_ends"):
        monkeypatch.setattr(selected, name, getattr(kernels, name))
    # Small tiles and few programs: shares cut requests, and end past the keys of some.
    monkeypatch.setattr(latent, "gpu_of", lambda device: Gpu(4, 1 << 18))
    monkeypatch.setattr(latent, "latent_launch", lambda *sizes: ShareLaunch(16, 32, 4, 1, 1, 1))
    return made


def names(made: list[Launch]) -> list[str]:
    found = [kernel._kernel.fn.__name__.removesuffix("_kernel") for kernel, *_ in made]
    made.clear()
    return found


class Model:
    """Sparse layers of one builder; each has its own indexer, and all have one cache."""

    def __init__(self, *topk: int, most_tokens: int = 64) -> None:
        self.specs = [SPEC.replace(sparse=SparseSpec("token_topk", count)) for count in topk]
        backend = TritonBackend.for_layer(SPEC)
        self.batch = paged_batch(SPEC, [1], [TOPK], block_size=16, device=DEVICE)
        self.impls = {
            str(index): backend.get_impl_cls().from_spec(
                spec, backend=backend, layer_name=str(index), tensors=self.batch.tensors
            )
            for index, spec in enumerate(self.specs)
        }
        layers: Any = {name: types.SimpleNamespace(impl=impl) for name, impl in self.impls.items()}
        config = BuilderConfig(layers=layers, max_num_seqs=4, max_num_batched_tokens=most_tokens)
        pages: Any = kv_cache_spec_for(SPEC, 16)
        self.builder = backend.get_builder_cls()(pages, [*layers], config, torch.device(DEVICE))
        generator = torch.Generator().manual_seed(3)
        self.cache = torch.randn(64, 16, RANK + ROPE, generator=generator).to(DEVICE)
        self.query = torch.randn(most_tokens, HEADS, RANK + ROPE, generator=generator).to(DEVICE)

    def run(
        self, metadata: Any, choose: Callable[[int], None], queries: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Outputs and LSEs of all layers; `choose` is what runs before each of them."""
        found = []
        for index, impl in enumerate(self.impls.values()):
            choose(index)
            query = queries[..., :RANK], queries[..., RANK:]
            output, lse = impl.forward_mqa(query, self.cache, metadata, None, wants_lse=True)
            found.append((output, lse))
        return found


def step_of(new: list[int], tokens: list[int], topk: int = TOPK) -> CommonAttentionMetadata:
    """Requests with distinct blocks of 16 tokens, and no keys chosen yet."""
    batch = paged_batch(SPEC, new, tokens, block_size=16, device=DEVICE)
    table = torch.randperm(63, generator=torch.Generator().manual_seed(5))[: len(new) * 12] + 1
    return dataclasses.replace(
        batch.common,
        block_table_tensor=table.view(len(new), 12).int().to(DEVICE),
        selection=Selection.allocate(sum(new), topk, DEVICE),
    )


def choose(common: CommonAttentionMetadata, most: int, seed: int, share: float = 1.0) -> None:
    """Draw keys of each query: as many as it may choose, times `share`; none for the first."""
    chosen, generator = common.selection, torch.Generator().manual_seed(seed)
    assert chosen is not None
    chosen.clear(0)
    for row, end in enumerate(ends_of(common)):
        picked = torch.randperm(max(end, 0), generator=generator)[: int(min(most, max(end, 0)) * share)]
        if row:
            chosen.positions[row, : len(picked)] = picked.int()
            chosen.counts[row] = len(picked)


def ends_of(common: CommonAttentionMetadata) -> list[int]:
    lens = common.seq_lens.tolist()
    starts = common.query_start_loc.tolist()
    return [
        lens[request] - (starts[request + 1] - row) + 1
        for request in range(len(lens))
        for row in range(starts[request], starts[request + 1])
    ]


def expect_right(
    model: Model, common: CommonAttentionMetadata, queries: torch.Tensor, found: tuple[torch.Tensor, ...]
) -> None:
    """The numbers of a layer are those of a softmax over its chosen latents."""
    output, lse = found
    assert common.selection is not None
    starts = common.query_start_loc.tolist()
    owners = [request for request, (a, b) in enumerate(itertools.pairwise(starts)) for _ in range(a, b)]
    for row, request in enumerate(owners):
        keys = common.selection.positions[row, : int(common.selection.counts[row])].long()
        blocks = common.block_table_tensor[request].long()[keys // 16]
        latents = model.cache[blocks, keys % 16]
        logits = queries[row] @ latents.T * SPEC.scale
        torch.testing.assert_close(output[row], logits.softmax(1) @ latents[:, :RANK], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(lse[row], logits.logsumexp(1), atol=1e-4, rtol=1e-4)


def test_a_layer_launches_a_table_a_decode_and_a_merge(
    launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only their order is of interest here.
    monkeypatch.setattr(BoundKernel, "__call__", lambda *call: launches.append((call[0], call[1], call[2:])))
    model = Model(TOPK, TOPK, 30, TOPK)
    layer = ["token_table", "latent_decode", "merge_shares"]
    for number, new in enumerate(([1, 1, 1], [1, 1, 1], [2, 0, 2], [1, 1, 1])):
        common = step_of(new, [150, 70, 9])
        metadata = model.builder.build(0, common)
        # Each topk has a plan, made before the layers in steps of a size that layers have seen.
        known = number in (1, 3)
        assert names(launches) == ["query_ends", *["plan_shares"] * (2 * known)]
        common.selection.clear(0)
        model.run(metadata, lambda _: None, model.query[: sum(new)])
        plan = [] if known else ["plan_shares"]
        planned = layer[:1] + plan + layer[1:]
        assert names(launches) == [*planned, *layer, *planned, *layer]


@pytest.mark.parametrize(
    ("new", "tokens", "shares"),
    [
        ([1, 1, 1, 1], [150, 70, 9, 150], (0.0, 1.0, 0.3)),
        ([3, 0, 1, 3], [40, 9, 180, 3], (0.4, 1.0, 1.0)),
        ([2, 5], [150, 3], (1.0, 0.2, 0.5)),
    ],
    ids=["more-later", "lengths", "before-0"],
)
def test_layers_choose_other_numbers_of_keys(
    new: list[int], tokens: list[int], shares: tuple[float, ...], launches: list[Launch]
) -> None:
    model, common = Model(TOPK, TOPK, 33), step_of(new, tokens)
    queries = model.query[: sum(new)]
    for _ in range(2):
        metadata = model.builder.build(0, common)

        def picks(index: int) -> None:
            choose(common, model.specs[index].sparse.topk, index, shares[index])

        found = model.run(metadata, picks, queries)
        for index, each in enumerate(found):
            picks(index)
            expect_right(model, common, queries, each)


@pytest.mark.parametrize("warmed", [True, False], ids=["warmed", "cold"])
@pytest.mark.parametrize("grown", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["grown", "same"])
def test_a_replay_serves_longer_requests_than_its_capture(
    warmed: bool, grown: bool, launches: list[Launch]
) -> None:
    """A graph is the launches of a run, with the memory that they were given."""
    model, new = Model(TOPK, 33), [2, 2]
    queries = model.query[:4]
    own = step_of(new, new)
    metadata = model.builder.build_for_cudagraph_capture(own)
    own.selection.clear(0)
    if warmed:
        model.run(metadata, lambda _: None, queries)
    launches.clear()
    cuts: list[int] = []
    outputs = model.run(metadata, lambda _: cuts.append(len(launches)), queries)
    graph = [launches[start:stop] for start, stop in zip(cuts, [*cuts[1:], None], strict=True)]
    assert names(launches).count("plan_shares") == (0 if warmed else 2)
    if grown:
        model.builder.build(0, step_of([40], [90]))
    for seed, tokens in enumerate(([180, 20], new, [9, 190])):
        later = step_of(new, tokens)
        own.seq_lens.copy_(later.seq_lens)
        own.block_table_tensor.copy_(later.block_table_tensor)
        model.builder.build(0, dataclasses.replace(own, seq_lens_host=later.seq_lens_host))
        for index, part in enumerate(graph):
            choose(own, model.specs[index].sparse.topk, seed, 1.0 if index else 0.4)
            for kernel, grid, given in part:
                kernel(grid, *given)
            expect_right(model, own, queries, outputs[index])


def test_steps_that_are_built_before_either_runs_keep_their_own_bounds(launches: list[Launch]) -> None:
    model = Model(TOPK, TOPK)
    steps = [step_of([1, 1], tokens) for tokens in ([20, 150], [190, 3])]
    queries = model.query[:2]
    for _ in range(2):
        both = [model.builder.build(0, common) for common in steps]
        for common, metadata in zip(steps, both, strict=True):
            for each in model.run(metadata, lambda _: choose(common, TOPK, 0), queries):  # noqa: B023
                expect_right(model, common, queries, each)
