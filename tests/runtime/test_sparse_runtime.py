"""Sparse layers in a runtime: one selection in the same memory for all of them, required in each step."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import attnplug
from attnplug.backends.torch_native.impl import TorchImpl
from attnplug.core import BuilderConfig, LayerSpec, Selection, SparseSpec
from attnplug.errors import BatchError, LayoutError
from attnplug.runtime import AttentionRuntime, GraphInputBuffers, StepBatch
from attnplug.runtime.steps.step_values import check_values
from attnplug.testing import assert_close, attention_oracle, direct_batch

SIZES = {"num_heads": 2, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
SPEC = LayerSpec(**SIZES, sparse=SparseSpec("token_topk", 6))
DENSE = SPEC.replace(sparse=None)


def runtime(*specs: LayerSpec, **options) -> AttentionRuntime:
    layers = {f"layers.{index}": spec for index, spec in enumerate(specs)}
    config = BuilderConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    return AttentionRuntime(attnplug.plan(layers, "cpu", num_blocks=32), config=config, **options)


def begun(made: AttentionRuntime, tokens: int = 20) -> StepBatch:
    requests = made.step_batch_builder()
    blocks = [made.block_pool.allocate(4) for _ in made.kv_cache_config.kv_cache_groups]
    requests.add_request("a", blocks)
    step = requests.step(tokens)
    made.begin_step(step)
    return step


def choose(selection: Selection, topk: int, block: int = 1, seed: int = 0) -> None:
    """What an indexer does: fill the rows of a request's first tokens."""
    generator = torch.Generator().manual_seed(seed)
    selection.clear()
    for row in range(selection.counts.shape[0]):
        order = torch.randperm(row // block + 1, generator=generator)[:topk]
        selection.positions[row, : order.numel()] = order.int()
        selection.counts[row] = order.numel()


def random(tokens: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(tokens, heads, 8) for heads in (2, 1, 1))


def test_each_indexer_writes_the_selection_that_the_layers_after_it_read():
    specs = SPEC, SPEC.replace(sliding_window=4), SPEC.replace(sparse=SparseSpec("block", 2, 4)), DENSE
    with runtime(*specs) as made:
        selection = begun(made).common.selection
        assert selection.positions.shape == (20, 6)
        query, key, value = random(20)
        for index, spec in enumerate(specs):
            if index != 1:  # the second layer shares what was chosen for the first
                choose(selection, *((2, 4) if index == 2 else (6, 1)), seed=index)
            found = made.forward(f"layers.{index}", query, key, value)
            expected = attention_oracle(spec, [query], [key], [value], [20], selection=selection)
            assert_close(found, expected.output, 1e-5)


@pytest.mark.parametrize("debug", [False, True])
def test_an_indexer_that_did_not_run_is_noticed(debug):
    with runtime(DENSE, SPEC, debug=debug) as made:
        step = begun(made)
        made.forward("layers.0", *random(20))
        with pytest.raises(
            BatchError, match=r"selection.counts\[0\]=-1 is not given; write the step's selection"
        ):
            made.forward("layers.1", *random(20))
        choose(step.common.selection, 6)
        made.forward("layers.1", *random(20))


def test_a_step_forgets_what_the_step_before_chose_and_keeps_the_memory():
    with runtime(SPEC) as made:
        requests = made.step_batch_builder()
        requests.add_request("a", [made.block_pool.allocate(4)])
        first = requests.step(8).common.selection
        choose(first, 6)
        requests.finish_step()
        second = requests.step(3).common.selection
        assert second.positions.data_ptr() == first.positions.data_ptr()
        assert (second.counts.tolist(), second.positions.unique().tolist()) == ([-1] * 3, [-1])


def test_a_step_without_a_selection_is_refused_before_any_layer_runs():
    with runtime(DENSE, SPEC) as made:
        step = begun(made)
        step.common.selection = None
        said = r"batch.common.selection=None is required: layer layers.1 is sparse token_topk 6; use the selection"
        with pytest.raises(BatchError, match=said):
            made.begin_step(step)
        step.common.selection = Selection.allocate(19, 6, "cpu")
        with pytest.raises(BatchError, match="selection=19 must have a row for each of the step's 20 tokens"):
            made.begin_step(step)


def test_steps_of_dense_plans_have_none():
    with runtime(DENSE) as made:
        assert begun(made).common.selection is None


def test_direct_layers_take_the_selection_of_their_own_batch():
    spec = SPEC.replace(direct_kv=True)
    batch = direct_batch(spec, [9, 4], [9, 4])
    with runtime(spec) as made:
        made.begin_step(direct=batch.common)
        found = made.forward("layers.0", batch.query, batch.key, batch.value)
        assert_close(found, batch.oracle().output, 1e-5)
        with pytest.raises(BatchError, match=r"direct\.selection=None is required"):
            made.begin_step(direct=dataclasses.replace(batch.common, selection=None))


@pytest.mark.parametrize("debug", [False, True])
def test_debug_mode_checks_values_that_a_backend_does_not(debug, monkeypatch):
    def attend(self, layer, query, key, value, kv_cache, metadata, output, **_):
        return output.zero_()

    monkeypatch.setattr(TorchImpl, "attend", attend)
    with runtime(SPEC, debug=debug) as made:
        selection = begun(made).common.selection
        choose(selection, 6)
        selection.positions[2, 0] = 3
        if not debug:
            made.forward("layers.0", *random(20))
            return
        with pytest.raises(BatchError, match=r"selection.positions\[2, 0\]=3 is past the last"):
            made.forward("layers.0", *random(20))
        selection.positions[2, 0], selection.counts[2] = -1, 0
        selection.positions[2] = -1
        made.forward("layers.0", *random(20))


@pytest.mark.parametrize(
    ("fields", "causal", "last"),
    [
        ({}, True, 4),
        ({"window": (2, 0)}, True, 4),
        ({"mm_prefix": True}, True, 6),
        ({"causal": False}, True, 4),
        ({"causal": False}, False, 8),
        ({"attn_type": "encoder_decoder"}, True, 11),
    ],
    ids=str,
)
def test_the_last_position_that_may_be_chosen(fields, causal, last):
    # Four new tokens of nine; the first has position 5 in the second request and position 4 in the first.
    selection = Selection.allocate(5, 6, "cpu")
    selection.clear(0)
    starts, lengths = torch.tensor([0, 1, 5], dtype=torch.int32), torch.tensor([5, 9], dtype=torch.int32)
    common = dataclasses.replace(
        direct_batch(DENSE, [1, 4], [5, 9], key_lens=[5, 9]).common,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([9, 9], dtype=torch.int32) if last == 8 else lengths,
        encoder_seq_lens=torch.tensor([12, 12], dtype=torch.int32),
        mm_prefix_spans=torch.tensor([[2, 7], *[[0, 0]] * 4], dtype=torch.int32),
        causal=causal,
        selection=selection,
    )
    spec = SPEC.replace(**fields)
    selection.counts[0], selection.positions[0, 0] = 1, last
    check_values(common, spec)
    selection.positions[0, 0] = last + 1
    with pytest.raises(BatchError, match="is past the last of the positions that the query can see"):
        check_values(common, spec)


def test_graph_buffers_take_a_steps_selection_and_padding_sees_nothing():
    buffers = GraphInputBuffers.allocate(
        4, 1, groups=1, max_blocks=16, inputs=["selection"], sparse_topk=6, device="cpu"
    )
    with runtime(SPEC) as made:
        requests = made.step_batch_builder()
        for name in "ab":
            requests.add_request(name, [made.block_pool.allocate(4)], num_computed_tokens=3)
        step = requests.step(1)
        choose(step.common.selection, 6)
        part = buffers.first(3, 1)
        part.copy_from(step)
        assert part.selection.positions.data_ptr() == buffers.selection.positions.data_ptr()
        assert part.selection.counts.tolist() == [1, 2, 0]
        assert part.selection.positions[2].tolist() == [-1] * 6
        part.clear()
        assert part.selection.counts.tolist() == [0, 0, 0]


def test_fast_prefill_refuses_sparse_layers_whose_selection_has_rows_for_all_tokens():
    plan = attnplug.plan({"0": SPEC, "1": SPEC}, "cpu", num_blocks=8, kv_sharing={"1": "0"})
    with pytest.raises(LayoutError, match="kv_sharing_fast_prefill='1' is sparse"):
        AttentionRuntime(plan, config=BuilderConfig(), kv_sharing_fast_prefill=True)
