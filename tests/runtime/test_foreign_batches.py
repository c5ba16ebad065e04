"""Batches and tensors that were not made for a runtime: each is refused before a layer runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from model_layers import layer
from served_model import ServedModel

from attnplug import plan
from attnplug.core import BuilderConfig
from attnplug.core.errors import BatchError
from attnplug.core.kv_cache_spec import FullAttentionSpec
from attnplug.runtime import AttentionRuntime, GraphState, StepBatchBuilder, build_attn_metadata
from attnplug.testing import direct_batch

pytestmark = pytest.mark.attack("foreign batches")

FULL = layer(dtype="float32")
WINDOW = layer(dtype="float32", sliding_window=20)
CHUNKED = layer(dtype="float32", chunk_size=16)
CROSS = layer(dtype="float32", attn_type="encoder_decoder")
ENCODER = layer(dtype="float32", attn_type="encoder", direct_kv=True)


def served(specs: Any = None, **asked: Any) -> ServedModel:
    """A model with 5 computed tokens of request "a"."""
    model = ServedModel(specs or {"0": FULL}, num_blocks=8, **asked)
    model.add("a")
    model.step(a=5)
    return model


def made_by(**changes: Any) -> StepBatchBuilder:
    sizes: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 32,
        "max_model_len": 64,
        "block_sizes": [16],
    }
    return StepBatchBuilder(**sizes | changes)


# Another builder


@pytest.mark.parametrize("size", [8, 32])
def test_a_batch_of_another_block_size(size):
    model, other = served(), made_by(block_sizes=[size])
    other.add_request("x", [[1, 2]])
    batch = other.step(3)
    said = rf"batch.block_sizes=\({size},\) must be \(16,\), those of the plan's KV groups; make batches with"
    with pytest.raises(BatchError, match=said):
        model.runtime.begin_step(batch)
    with pytest.raises(BatchError, match=r"batch.block_sizes="):
        build_attn_metadata(model.runtime.attention_groups, batch, model.runtime.kv_cache_config)
    with pytest.raises(BatchError, match="has no step"):
        model.runtime.forward("0", torch.zeros(3, 4, 8))
    model.step(a=3)


def test_built_metadata_does_not_hide_another_block_size():
    model, other = served(), made_by(block_sizes=[8])
    own = model.batches.step(1)
    built = build_attn_metadata(model.runtime.attention_groups, own, model.runtime.kv_cache_config)
    other.add_request("x", [[1]])
    with pytest.raises(BatchError, match=r"batch.block_sizes=\(8,\) must be \(16,\)"):
        model.runtime.begin_step(other.step(1), metadata=built)


def test_a_batch_of_a_plan_whose_windows_pass_other_blocks():
    model = served()
    for spec, said in (
        (WINDOW, "SlidingWindowSpec(sliding_window=20)"),
        (CHUNKED, "ChunkedLocalAttentionSpec(chunk=16)"),
    ):
        other = served({"0": spec})
        with pytest.raises(BatchError) as error:
            model.runtime.begin_step(other.batches.step(1))
        assert f"batch.kv_cache_specs[0]='{said}' must be FullAttentionSpec" in str(error.value)
    with pytest.raises(BatchError, match=r"must be SlidingWindowSpec\(sliding_window=20\)"):
        served({"0": WINDOW}).runtime.begin_step(
            served({"0": WINDOW.replace(sliding_window=19)}).batches.step(1)
        )
    model.step(a=3)


def test_a_batch_of_a_twin_is_served():
    model, twin = served(), served()
    batch = twin.batches.step(1)
    model.runtime.begin_step(batch)
    wider = served({"0": layer(dtype="float32", num_kv_heads=4)})
    wider.runtime.begin_step(batch)


def test_a_graphs_step_of_another_block_size():
    config = BuilderConfig(max_num_seqs=2, max_model_len=64, cudagraph_batch_sizes=(2,))
    runtime = AttentionRuntime(plan({"0": FULL}, "cpu", num_blocks=8), config=config)
    state = GraphState(runtime)
    buffers = state.get_graph_input_buffers(2)
    before = buffers.block_tables.clone()
    other = made_by(block_sizes=[8])
    other.add_request("x", [[1]])
    other.add_request("y", [[2]])
    with pytest.raises(BatchError, match=r"batch.block_sizes=\(8,\) must be \(16,\)"):
        state.prepare_graph_input_buffers(buffers, other.step(1))
    assert torch.equal(buffers.block_tables, before)


# Another device


def test_a_batch_on_another_device():
    model, other = served(), made_by(device="meta")
    other.add_request("x", [[1]])
    with pytest.raises(BatchError, match=r"batch.block_tables.device='meta' must be cpu, the runtime's"):
        model.runtime.begin_step(other.step(1))
    model.step(a=3)


@pytest.mark.parametrize("field", ["query_start_loc", "seq_lens"])
def test_lengths_on_another_device(field):
    model = served({"0": FULL, "e": ENCODER})
    batch, direct = model.batches.step(1), direct_batch(ENCODER, [3], [3]).common
    for given, name in ((batch.common, "batch.common"), (direct, "direct")):
        common = dataclasses.replace(given, **{field: getattr(given, field).to("meta")})
        asked = (
            {"direct": common} if given is direct else {"batch": dataclasses.replace(batch, common=common)}
        )
        with pytest.raises(BatchError, match=rf"{name}.{field}.device='meta' must be cpu"):
            model.runtime.begin_step(**asked)


@pytest.mark.parametrize("wrong", ["query", "key", "value", "output", "output_lse"])
def test_tensors_on_another_device_are_refused_and_nothing_is_written(wrong):
    model = served({"0": layer(dtype="float32", needs_lse=True)})
    model.begin(a=3)
    before = model.runtime.kv_caches["0"].clone()
    given = {
        "query": torch.zeros(3, 4, 8),
        "key": torch.zeros(3, 2, 8),
        "value": torch.zeros(3, 2, 8),
        "output": torch.zeros(3, 4, 8),
        "output_lse": torch.zeros(3, 4),
    }
    given[wrong] = given[wrong].to("meta")
    with pytest.raises(BatchError, match=f"{wrong}.device='meta' of layer 0 must be cpu"):
        model.runtime.forward("0", **given)
    assert torch.equal(model.runtime.kv_caches["0"], before)
    model.check("0", model.draw("0", {"a": 3}))


# Pages past the pool


@pytest.mark.parametrize("block", [8, 2**31 - 1, -1, -(2**31)])
def test_a_page_to_read_past_the_pool(block):
    model = served()
    batch = model.batches.step(1)
    batch.block_tables[0, 0, 0] = block
    with pytest.raises(
        BatchError, match=rf"batch.block_tables\[0\]={block} must be in 0 .. 7, the blocks of"
    ):
        model.runtime.begin_step(batch)


@pytest.mark.parametrize("block", [8, -1])
def test_pages_behind_a_requests_length_may_be_anything(block):
    model = served()
    model.add("b")
    model.step(b=20)
    batch = model.batches.step({"a": 1})
    batch.block_tables[0, list(batch.req_ids).index("a"), 1:] = block
    model.runtime.begin_step(batch)
    model.check("0", model.draw("0", {"a": 1}))


def test_a_table_of_fewer_pages_than_a_request_reads():
    model = served()
    batch = model.batches.step(1)
    narrow = dataclasses.replace(batch, block_tables=batch.block_tables[:, :, :0])
    with pytest.raises(BatchError, match=r"batch.block_tables\[0\]=0 pages are too few: a request reads 1"):
        model.runtime.begin_step(narrow)


def test_an_encoders_page_past_the_pool():
    model = ServedModel({"0": FULL, "cross": CROSS}, num_blocks=8, max_encoder_len=24)
    model.add("a", encoder_len=19)
    model.step(a=1)
    (cross,) = model.batches.cross_groups
    batch = model.batches.step(1)
    batch.block_tables[cross, 0, 1] = 8
    with pytest.raises(BatchError, match=rf"batch.block_tables\[{cross}\]=8 must be in 0 .. 7"):
        model.runtime.begin_step(batch)


def test_a_builder_that_does_not_know_the_pool():
    model, other = served(), made_by()
    other.add_request("x", [[8]], num_computed_tokens=3)
    batch = other.step(0)
    with pytest.raises(BatchError, match=r"batch.block_tables\[0\]=8 must be in 0 .. 7"):
        model.runtime.begin_step(batch)


# Null blocks


def with_null(
    spec: Any, blocks: list[int], computed: int, tokens: int = 1
) -> tuple[AttentionRuntime, StepBatchBuilder]:
    made = plan({"0": spec}, "cpu", num_blocks=8)
    runtime = AttentionRuntime(made, config=BuilderConfig(max_model_len=64))
    requests = runtime.step_batch_builder()
    requests.add_request("a", [blocks], num_computed_tokens=computed)
    return runtime, requests


@pytest.mark.parametrize(
    ("spec", "blocks", "computed", "tokens", "said"),
    [
        (
            FULL,
            [0, 3],
            16,
            1,
            "block=0 of request a in KV group 0 is null, and token 0 is attended; give it a block",
        ),
        (FULL, [3, 0], 15, 2, "block=1 of request a in KV group 0 is null, and token 16 is attended"),
        (FULL, [0], 0, 1, "block=0 of request a"),
        (FULL, [4, 0, 5], 40, 1, "block=1 of request a in KV group 0 is null, and token 16"),
        (WINDOW, [0, 3, 4], 34, 1, "block=0 of request a in KV group 0 is null, and token 15 is attended"),
        (WINDOW, [0, 0, 4], 35, 1, "block=1 of request a in KV group 0 is null, and token 16 is attended"),
        (WINDOW, [0, 3, 4], 0, 40, "block=0 of request a in KV group 0 is null, and token 0 is attended"),
        (CHUNKED, [0, 0], 31, 1, "block=1 of request a in KV group 0 is null, and token 16 is attended"),
    ],
)
def test_a_null_block_where_tokens_are_attended(spec, blocks, computed, tokens, said):
    _, requests = with_null(spec, blocks, computed)
    for _ in range(2):
        with pytest.raises(BatchError) as error:
            requests.step(tokens)
        assert said in str(error.value)
    assert requests.step(0).common.num_actual_tokens == 0


@pytest.mark.parametrize(
    ("spec", "blocks", "computed"),
    [
        (WINDOW, [0, 3, 4], 35),
        (WINDOW, [0, 0, 4], 51 - 16 + 16),
        (CHUNKED, [0, 3], 16),
        (CHUNKED, [0, 3], 31),
        (FULL, [3, 0], 5),
    ],
)
def test_a_null_block_that_no_token_needs(spec, blocks, computed):
    if computed == 51:
        blocks = [*blocks, 5]
    runtime, requests = with_null(spec, blocks, computed)
    runtime.begin_step(requests.step(1))


@pytest.mark.parametrize(
    ("spec", "blocks", "computed", "page"),
    [
        (FULL, [0, 3], 16, 0),
        (FULL, [3, 0, 4], 33, 1),
        (WINDOW, [0, 0, 4], 35, 1),
        (CHUNKED, [3, 0, 4], 40, None),
    ],
)
def test_a_null_block_that_a_builder_without_specs_accepts(spec, blocks, computed, page):
    runtime, _ = with_null(spec, [1], 0)
    other = made_by()
    other.add_request("y", [[1]])
    other.add_request("x", [blocks], num_computed_tokens=computed)
    batch = other.step(1)
    if page is None:
        runtime.begin_step(batch)
        return
    said = rf"batch.block_tables\[0\]\[1, {page}\]=0 is the null block, and request 1 of the batch attends its token"
    with pytest.raises(BatchError, match=said):
        runtime.begin_step(batch)


def test_null_blocks_move_with_their_requests_and_leave_with_them():
    _, requests = with_null(FULL, [0, 3], 16)
    requests.add_request("b", [[4, 5]], num_computed_tokens=16)
    requests.swap_states(0, 1)
    with pytest.raises(BatchError, match="of request a in KV group 0 is null"):
        requests.step(1)
    assert requests.step({"b": 1}).common.num_actual_tokens == 1
    requests.remove_request("a")
    requests.add_request("a", [[6, 7]], num_computed_tokens=16)
    assert requests.step(1).common.num_actual_tokens == 2


def test_a_cross_group_has_no_null_blocks():
    made = plan({"0": FULL, "cross": CROSS}, "cpu", num_blocks=8)
    runtime = AttentionRuntime(made, config=BuilderConfig(max_model_len=64))
    requests = runtime.step_batch_builder(max_encoder_len=32)
    (cross,) = requests.cross_groups
    blocks = [[1], [1]]
    blocks[cross] = [2, 0]
    requests.add_request("a", blocks, encoder_len=17)
    with pytest.raises(
        BatchError, match=rf"of request a in KV group {cross} is null, and token 16 is attended"
    ):
        requests.step(1)


def test_only_pages_that_a_window_has_passed_are_freed():
    for spec, passed in ((FULL, 0), (WINDOW, 1), (CHUNKED, 2)):
        _, requests = with_null(spec, [1, 2, 3], 35)
        with pytest.raises(
            BatchError, match=rf"num_blocks={passed + 1} must be in 0 .. {passed}, the pages that"
        ):
            requests.free_blocks("a", 0, passed + 1)
        requests.free_blocks("a", 0, passed)
        assert requests.step(1).common.num_actual_tokens == 1


def test_specs_of_other_block_sizes_are_refused():
    page = FullAttentionSpec(block_size=8, num_kv_heads=2, head_size=8, dtype="float32")
    with pytest.raises(BatchError, match=r"kv_cache_specs=\(8,\) must have the block sizes \(16,\)"):
        made_by(kv_cache_specs=[page])


def test_dummy_steps_read_null_blocks_only():
    model = ServedModel({"0": FULL, "1": WINDOW})
    model.runtime.warm_up()
    model.runtime.begin_step(model.batches.profile_step(2, 30))
    rows = torch.zeros(30, 4, 8), torch.zeros(30, 2, 8), torch.zeros(30, 2, 8)
    assert not model.runtime.forward("0", *rows).any()
    assert np.all(model.batches._requests.null_ends == 0)
