"""Sparse layers of latent attention: each query decodes the keys that an indexer picked for it."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from indexer import choose, index_scores

import attnplug
from attnplug.backends.torch_native import TorchBackend
from attnplug.core import (
    BuilderConfig,
    Device,
    Feature,
    LayerSpec,
    MLADims,
    Phase,
    Selection,
    SparseSpec,
)
from attnplug.core.composite import composite_backend
from attnplug.core.errors import BatchError, LayoutError, SpecError
from attnplug.core.kv_cache_spec import kv_cache_spec_for
from attnplug.mla.selected import SelectedSteps, token_pages
from attnplug.registry import Registry
from attnplug.runtime import AttentionRuntime
from attnplug.testing import assert_close, attention_oracle, paged_batch, run_batch
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference
from attnplug.testing.drawn_values import layer_tensors

DIMS = MLADims(q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
DENSE = LayerSpec(num_heads=6, num_kv_heads=1, head_size=40, mla=DIMS, dtype="float32")
SPEC = DENSE.replace(sparse=SparseSpec("token_topk", 5))
CPU = Device("cpu")


@pytest.fixture
def sparse(loop: Any) -> Any:
    """A backend whose author wrote `decode` and declares Feature.SPARSE."""
    loop.features = loop.features | Feature.SPARSE
    return loop


def expect_right(backend: Any, batch: Batch) -> torch.Tensor:
    found = Output(*run_batch(backend, batch))
    assert difference(batch, found) is None
    return found.output[: batch.common.num_actual_tokens]


def test_a_decode_gets_every_query_as_a_request_with_pages_of_one_token(sparse: Any) -> None:
    batch = paged_batch(SPEC.replace(needs_lse=True), [1, 0, 4, 20], [30, 9, 40, 33], padding=2, block_size=8)
    expect_right(sparse, batch)
    ((q_nope, _, step),) = sparse.calls
    assert q_nope.shape[0] == step.num_reqs == step.num_actual_tokens == 25
    assert step.query_start_loc.tolist() == step.query_start_loc_cpu.tolist() == list(range(26))
    assert (step.max_query_len, step.max_seq_len, step.seq_lens_host) == (1, 5, None)
    assert step.seq_lens.tolist() == batch.common.selection.counts[:25].tolist()
    # The first query is the last of the 30 tokens of the first request.
    chosen = sorted(batch.common.selection.positions[0, : int(step.seq_lens[0])].tolist())
    table = batch.common.block_table_tensor[0]
    places = [int(table[position // 8]) * 8 + position % 8 for position in chosen]
    assert sorted(step.block_table_tensor[0, : len(chosen)].tolist()) == sorted(places)


@pytest.mark.parametrize("kind", [SparseSpec("token_topk", 64), SparseSpec("block", 16, 4)], ids=str)
def test_a_selection_of_all_keys_is_dense_attention(sparse: Any, kind: SparseSpec) -> None:
    sparse.supported_sparse_kinds = ("token_topk", "block")
    batch = paged_batch(SPEC.replace(sparse=kind), [3, 1, 12], [33, 60, 12])
    for row, position in enumerate([30, 31, 32, 59, *range(12)]):
        count = -(-(position + 1) // kind.block)
        batch.common.selection.positions[row, :count] = torch.arange(count).flip(0).int()
        batch.common.selection.counts[row] = count
    output = expect_right(sparse, batch)
    dense, _ = run_batch(sparse.with_prefill(TorchBackend), dataclasses.replace(batch, spec=DENSE))
    assert_close(output, dense, 2e-5)


def test_a_key_that_only_its_indexer_finds_is_attended_beyond_topk_keys(sparse: Any) -> None:
    """A needle far before the last topk keys: the failure that short prompts do not show."""
    batch = paged_batch(SPEC, [1], [200])
    generator = torch.Generator().manual_seed(0)
    index_keys = torch.randn(200, 16, generator=generator)
    query = index_keys[7][None, None].expand(1, 4, -1)
    scores = index_scores(query, index_keys, torch.ones(1, 4))
    choose(scores, torch.tensor([199]), 5, batch.common.selection)
    assert 7 in batch.common.selection.positions[0].tolist()
    found = expect_right(sparse, batch)
    needle = batch.common.selection.positions[0].tolist().index(7)
    others = torch.tensor([each for each in range(200) if each != 7])
    batch.common.selection.positions[0, needle] = int(others[-1])
    if int(others[-1]) not in batch.common.selection.positions[0, :needle].tolist():
        assert (expect_right(sparse, batch) - found).abs().max() > 1e-3


@pytest.mark.parametrize("topk", [1, 6, 64])
def test_an_indexer_chooses_the_highest_scores_of_the_keys_that_a_query_sees(topk: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(*size, generator=generator) for size in ((9, 3, 8), (20, 8)))
    weights, positions = torch.rand(9, 3, generator=generator), torch.arange(11, 20)
    scores = index_scores(query, key, weights)
    chosen = Selection.allocate(9, 64, "cpu")
    choose(scores, positions, topk, chosen)
    chosen.check_values(SparseSpec("token_topk", topk), positions + 1)
    for row, position in enumerate(positions.tolist()):
        seen = scores[row, : position + 1]
        count = min(topk, position + 1)
        assert chosen.counts[row] == count
        kept = chosen.positions[row, :count].long()
        assert torch.equal(seen[kept].sort().values, seen.sort().values[-count:])
    # Equal scores: the first positions, so that the choice is one.
    choose(torch.zeros(9, 20), positions, topk, chosen)
    assert chosen.positions[0, : min(topk, 12)].tolist() == list(range(min(topk, 12)))


def test_blocks_that_are_apart_keep_their_places(sparse: Any) -> None:
    batch = paged_batch(SPEC, [1, 6], [30, 40], block_size=8)
    cache = batch.kv_cache
    apart = torch.full((cache.shape[0], cache[0].numel() + 24), torch.nan)[:, : cache[0].numel()]
    expect_right(sparse, dataclasses.replace(batch, kv_cache=apart.view(cache.shape).copy_(cache)))


def test_pages_of_one_token_are_views() -> None:
    cache = torch.arange(4 * 8 * 10).view(4, 8, 10)
    pages, steps = token_pages(cache)
    assert (pages.shape, steps) == ((32, 1, 10), (8, 1))
    assert torch.equal(pages[2 * 8 + 3, 0], cache[2, 3])
    # A block of three layers, of which the second is this one, and one with 4 elements between blocks.
    for raw, own in (
        (torch.arange(4 * 240).view(4, 3, 8, 10), lambda raw: raw[:, 1]),
        (torch.arange(4 * 84).view(4, 84), lambda raw: raw[:, :80].view(4, 8, 10)),
    ):
        pages, steps = token_pages(own(raw))
        for block, token in ((0, 0), (2, 3), (3, 7)):
            assert torch.equal(pages[block * steps[0] + token * steps[1], 0], own(raw)[block, token])
    assert token_pages(torch.zeros(1, 1, 10))[0].shape == (1, 1, 10)


def test_more_places_than_an_int32_table_can_name_are_refused() -> None:
    storage = torch.empty(1 << 22, 513, 576, dtype=torch.uint8, device="meta")
    with pytest.raises(LayoutError, match=r"has 2151677951 places, past int32; give each layer blocks"):
        token_pages(storage[:, :512].as_strided((1 << 22, 512, 576), (513 * 576, 576, 1)))


def test_a_step_needs_a_selection_with_a_row_for_each_query(sparse: Any) -> None:
    batch = paged_batch(SPEC, [1, 3], [9, 30])
    without = dataclasses.replace(batch.common, selection=None)
    with pytest.raises(BatchError, match="selection=None is required: the layers are sparse; give"):
        run_batch(sparse, dataclasses.replace(batch, common=without))
    short = dataclasses.replace(batch.common, selection=batch.common.selection[:3])
    with pytest.raises(BatchError, match="must have a row for each of the step's 4 tokens"):
        run_batch(sparse, dataclasses.replace(batch, common=short))


def test_tables_keep_their_memory_while_steps_do_not_grow() -> None:
    steps = SelectedSteps(4, torch.device("cpu"))
    batches = [paged_batch(SPEC, [new], [30]).common for new in (3, 2, 4, 5)]
    made = [steps.step(each, each.num_actual_tokens) for each in batches]
    addresses = [selected.page_table.data_ptr() for selected, _ in made]
    assert addresses[0] == addresses[1] == addresses[2] != addresses[3]
    assert made[3][1].max_seq_len == 4
    sized = SelectedSteps(4, torch.device("cpu"), [3, 10])
    rooms = []
    for each in batches:
        sized.step(each, each.num_actual_tokens)
        rooms.append(len(sized._buffers[0]))
    assert rooms == [3, 3, 10, 10]


def test_a_backend_that_does_not_declare_selections_refuses_them(loop: Any) -> None:
    reasons = [str(each) for each in loop.validate_configuration(SPEC, CPU, Phase.DECODE)]
    assert reasons == ["sparse token_topk 5 not supported"]
    loop.features = loop.features | Feature.SPARSE
    assert loop.validate_configuration(SPEC, CPU, None) == []
    other = SPEC.replace(sparse=SparseSpec("block", 2, 4))
    (reason,) = loop.validate_configuration(other, CPU, None)
    assert "sparse block 2 of 4 tokens not supported: kind block is not token_topk" in str(reason)
    window = [str(each) for each in loop.validate_configuration(SPEC.replace(sliding_window=4), CPU, None)]
    assert window == ["sliding_window not supported"]


def test_a_class_of_its_own_serves_sparse_layers_in_both_phases(sparse: Any) -> None:
    serving = sparse.for_layer(SPEC)
    assert serving is sparse.for_layer(SPEC) is serving.for_layer(SPEC) is not sparse
    assert serving.for_layer(DENSE) is serving
    assert sparse.for_layer(DENSE) is sparse
    assert sparse.with_prefill(TorchBackend).for_layer(SPEC) is serving
    assert (serving.get_name(), serving.prefill) == ("LOOP", None)
    with pytest.raises(SpecError, match="sparse layers decode every query"):
        serving.with_prefill(TorchBackend)
    with pytest.raises(SpecError, match=r"is served by a class of its own; take Loop.for_layer\(spec\)"):
        sparse.get_impl_cls().from_spec(SPEC, backend=sparse, layer_name="x", tensors=layer_tensors(SPEC))


def test_two_backends_cannot_split_the_phases_of_a_sparse_layer(sparse: Any) -> None:
    both = composite_backend(TorchBackend, sparse)
    reasons = [str(each) for each in both.validate_configuration(SPEC, CPU, None)]
    assert "MLA not supported" in reasons


def test_a_plan_of_dense_and_sparse_layers_runs_step_by_step(sparse: Any) -> None:
    plugin = types.SimpleNamespace(ATTNPLUG_API=(1, 1), attnplug_backends=attnplug.hookimpl(lambda: [sparse]))
    registry = Registry()
    registry.register(plugin, name="loop")
    specs = {"a": SPEC, "b": DENSE, "c": SPEC.replace(sparse=SparseSpec("token_topk", 3))}
    made = attnplug.plan(specs, "cpu", num_blocks=32, registry=registry)
    assert {name: decision.backend for name, decision in made.decisions.items()} == {
        "a": "LOOP",
        "b": "TORCH+LOOP",
        "c": "LOOP",
    }
    # Sparse layers expand nothing.
    assert attnplug.plan({"a": SPEC}, "cpu", registry=registry).prefill_workspace_bytes() == 0
    tensors = {name: layer_tensors(spec) for name, spec in specs.items()}
    config = BuilderConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    generator = torch.Generator().manual_seed(0)
    with AttentionRuntime(made, tensors, config=config) as runtime:
        batches = runtime.step_batch_builder()
        batches.add_request(
            "x", [runtime.block_pool.allocate(4) for _ in made.kv_cache_config.kv_cache_groups]
        )
        known: dict[str, list[torch.Tensor]] = {name: [] for name in specs}
        for count in (20, 1, 7, 1):
            step = batches.step(count)
            runtime.begin_step(step)
            chosen = step.common.selection
            for seed, (name, spec) in enumerate(specs.items()):
                query = torch.randn(count, 6, spec.query_size, generator=generator)
                key = torch.randn(count, 1, 40, generator=generator)
                known[name].append(key)
                keys = torch.cat(known[name])
                if spec.sparse is not None:
                    # Each layer has its own indexer.
                    scores = torch.rand(count, len(keys), generator=torch.Generator().manual_seed(seed))
                    choose(scores, torch.arange(len(keys) - count, len(keys)), spec.sparse.topk, chosen)
                found = runtime.forward(name, query, key, None)
                given = {"selection": chosen[:count]} if spec.sparse else {}
                expected = attention_oracle(
                    spec, [query], [keys], [keys[..., :32]], [len(keys)], tensors=tensors[name], **given
                )
                assert_close(found, expected.output, 2e-5)
            batches.finish_step()


def test_captured_metadata_reads_the_lengths_tables_and_selections_of_later_steps(sparse: Any) -> None:
    """On a CPU, the metadata of a capture stands for the graph: a replay reads the tensors that it has."""
    first, *later = (
        paged_batch(SPEC, [2, 2, 2], tokens, seed=seed, block_size=8)
        for seed, tokens in enumerate(([60, 60, 60], [9, 60, 33], [60, 2, 17]))
    )
    serving = sparse.for_layer(SPEC)
    impl = serving.get_impl_cls().from_spec(SPEC, backend=serving, layer_name="0", tensors=first.tensors)
    config = BuilderConfig(layers={"0": types.SimpleNamespace(impl=impl)})
    cache: Any = kv_cache_spec_for(SPEC, 8)
    builder = serving.get_builder_cls()(cache, ["0"], config, torch.device("cpu"))
    metadata = builder.build_for_cudagraph_capture(first.common)
    for batch in later:
        builder.build(0, batch.common)
        ours, theirs = first.common, batch.common
        ours.seq_lens.copy_(theirs.seq_lens)
        ours.block_table_tensor.zero_()[:, : theirs.block_table_tensor.shape[1]] = theirs.block_table_tensor
        ours.slot_mapping.copy_(theirs.slot_mapping)
        ours.selection.copy_from(theirs.selection)
        output = torch.full((6, 6, 10), torch.nan)
        impl.forward(None, batch.query, batch.key, None, batch.kv_cache, metadata, output)
        assert difference(dataclasses.replace(batch, tensors=first.tensors), Output(output, None)) is None
