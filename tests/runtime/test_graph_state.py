"""The buffers of captured graphs, how steps are padded into them, and what is captured."""

from __future__ import annotations

import pytest
import torch
from fake_backends import offered
from graph_backends import graph_backend
from graph_models import (
    ALWAYS,
    CROSS,
    FULL,
    LONGEST,
    SLIDING,
    UNIFORM,
    config,
    encoder_decoder,
    served,
    state_of,
)

from attnplug import plan
from attnplug.core.errors import BatchError
from attnplug.runtime import AttentionRuntime, GraphState
from attnplug.testing import assert_close

# Buffers


def test_buffers_begin_as_padding_of_the_largest_size():
    buffers = state_of(served()).get_graph_input_buffers(4, 3)
    assert buffers.query_start_loc.tolist() == [0] * 5
    assert buffers.seq_lens.tolist() == [1] * 4
    assert buffers.block_tables.tolist() == [[[0] * 4] * 4] * 2
    assert buffers.slot_mappings.tolist() == [[-1] * 12] * 2
    assert buffers.encoder_seq_lens is None
    assert [t.dtype for t in (buffers.query_start_loc, buffers.seq_lens, buffers.block_tables)] == [
        torch.int32
    ] * 3
    assert buffers.slot_mappings.dtype == torch.int64


def test_graphs_of_all_sizes_read_the_same_memory():
    state = state_of(served())
    small, large = state.get_graph_input_buffers(2), state.get_graph_input_buffers(4, 3)
    for field in ("query_start_loc", "seq_lens", "block_tables", "slot_mappings"):
        assert getattr(small, field).data_ptr() == getattr(large, field).data_ptr()
    assert (small.num_tokens, large.num_tokens) == (2, 12)


def test_an_encoder_decoder_model_has_encoder_lengths_and_cross_tables_too():
    _, state = encoder_decoder()
    buffers = state.get_graph_input_buffers(2)
    assert buffers.encoder_seq_lens is not None
    assert buffers.encoder_seq_lens.tolist() == [1, 1]
    assert buffers.block_tables.shape == (2, 2, 4)
    assert buffers.slot_mappings.tolist() == [[-1, -1]] * 2


def test_the_sizes_come_from_the_configuration():
    state = state_of(served())
    assert state.batch_sizes == (2, 4)
    assert [state.batch_size_for(reqs) for reqs in (0, 1, 2, 3, 4, 5)] == [2, 2, 2, 4, 4, None]


def test_lengths_default_to_the_configuration():
    made = config(max_model_len=32, num_speculative_tokens=2)
    with offered(graph_backend(UNIFORM)):
        runtime = AttentionRuntime(plan({"0": FULL}, "cpu", num_blocks=4), config=made)
    state = GraphState(runtime)
    assert (state.max_model_len, state.max_query_len) == (32, 3)


def test_buffers_have_no_more_requests_than_the_largest_size():
    state = state_of(served())
    for size in (0, 5):
        with pytest.raises(BatchError, match=f"batch_size={size} must be in 1 .. 4"):
            state._buffers.first(size, 1)


# A step copied in


def test_a_draft_step_is_built_for_drafting(monkeypatch):
    model = served(drafts=2)
    state, calls = state_of(model), []
    for group in model.runtime.attention_groups:
        build = group.builder.build_for_drafting
        note = lambda common, index, build=build: calls.append(index) or build(common, index)  # noqa: E731
        monkeypatch.setattr(group.builder, "build_for_drafting", note)
    model.add("a")
    batch = model.begin(a=1)
    buffers = state.get_graph_input_buffers(2)
    state.prepare_graph_input_buffers(buffers, batch)
    assert calls == []
    state.prepare_graph_input_buffers(buffers, batch, draft_index=1)
    assert calls == [1] * len(model.runtime.attention_groups)


def test_a_smaller_step_is_padded():
    model = served()
    state = state_of(model)
    for name, tokens in (("a", 20), ("b", 3), ("c", 5)):
        model.add(name)
        model.step(**{name: tokens})
    batch = model.begin(a=3, b=3, c=3)
    buffers = state.get_graph_input_buffers(4, 3)
    padded = state.prepare_graph_input_buffers(buffers, batch)
    assert buffers.query_start_loc.tolist() == [0, 3, 6, 9, 12]
    assert buffers.seq_lens.tolist() == [23, 6, 8, 1]
    for group in (0, 1):
        table, slots = batch.of_group(group)
        assert buffers.slot_mappings[group].tolist() == [*slots.tolist(), -1, -1, -1]
        assert torch.equal(buffers.block_tables[group, :3], table)
        assert not buffers.block_tables[group, 3].any()
    common = padded.common
    assert (common.num_reqs, common.num_actual_tokens, common.max_query_len) == (4, 12, 3)
    assert common.max_seq_len == LONGEST
    assert common.query_start_loc_cpu.tolist() == [0, 3, 6, 9, 12]
    assert common.seq_lens_host is not None
    assert common.seq_lens_host.tolist() == [23, 6, 8, 1]
    assert common.seq_lens_host_exact
    assert padded.req_ids == batch.req_ids
    assert padded.block_tables.data_ptr() == buffers.block_tables.data_ptr()


def test_what_a_fuller_step_left_is_overwritten():
    model = served({"0": FULL})
    state = state_of(model)
    buffers = state.get_graph_input_buffers(2)
    for name in ("a", "b"):
        model.add(name)
        model.step(**{name: 20})
    batch = model.begin(a=1, b=1)
    state.prepare_graph_input_buffers(buffers, batch)
    assert buffers.seq_lens.tolist() == [21, 21]
    assert (buffers.slot_mappings >= 0).all()
    model.finish(a=1, b=1)
    model.remove("a")
    state.prepare_graph_input_buffers(buffers, model.begin(b=1))
    assert buffers.seq_lens.tolist() == [22, 1]
    assert buffers.slot_mappings[0, 1] == -1
    assert not buffers.block_tables[0, 1].any()
    assert buffers.query_start_loc.tolist() == [0, 1, 2]


def test_a_step_without_requests_is_all_padding():
    model = served({"0": FULL})
    state = state_of(model)
    buffers = state.get_graph_input_buffers(2, 3)
    padded = state.prepare_graph_input_buffers(buffers, model.batches.step([]))
    assert buffers.query_start_loc.tolist() == padded.common.query_start_loc_cpu.tolist() == [0, 3, 6]
    assert buffers.seq_lens.tolist() == [1, 1]


def test_a_step_with_fewer_queries_than_the_graph_where_any_batch_is_supported():
    model = served({"0": FULL}, ALWAYS)
    state = state_of(model)
    for name in ("a", "b"):
        model.add(name)
        model.step(**{name: 5})
    buffers = state.get_graph_input_buffers(4, 3)
    padded = state.prepare_graph_input_buffers(buffers, model.begin(a=1, b=3))
    assert buffers.query_start_loc.tolist() == [0, 1, 4, 7, 10]
    assert padded.common.query_start_loc_cpu.tolist() == [0, 1, 4, 7, 10]
    assert (buffers.slot_mappings[0] >= 0).tolist() == [True] * 4 + [False] * 8


@pytest.mark.parametrize(
    "specs", [{"0": FULL}, {"0": FULL, "1": SLIDING, "2": SLIDING}], ids=["one", "hybrid"]
)
@pytest.mark.parametrize("queries", [1, 3])
def test_a_padded_step_gives_what_the_step_gives(specs, queries):
    model = served(specs)
    state = state_of(model)
    for name, tokens in (("a", 30), ("b", 3), ("c", 17)):
        model.add(name)
        model.step(**{name: tokens})
    scheduled = dict.fromkeys("abc", queries)
    state.prepare_graph_input_buffers(state.get_graph_input_buffers(4, queries), model.begin(**scheduled))
    for name in specs:
        drawn = model.draw(name, scheduled)
        query, key, value = (
            torch.cat([rows, rows.new_full((queries, *rows.shape[1:]), 9.0)])
            for rows in (drawn.query, drawn.key, drawn.value)
        )
        found = model.runtime.forward(name, query, key, value)
        assert_close(found[: 3 * queries], drawn.expected, 1e-5)
    model.finish(**scheduled)
    model.step(a=1, b=1, c=1)
    assert all(not cache[0].any() for cache in model.runtime.kv_caches.values())


def test_cross_attention_reads_encoder_lengths_and_tables_from_the_buffers():
    model, state = encoder_decoder()
    for name, tokens in (("a", 33), ("b", 7)):
        model.add(name, encoder_len=tokens)
    model.step(a=4, b=1)
    buffers = state.get_graph_input_buffers(4)
    padded = state.prepare_graph_input_buffers(buffers, model.begin(a=1, b=1))
    assert buffers.encoder_seq_lens is not None
    assert buffers.encoder_seq_lens.tolist() == [33, 7, 1, 1]
    assert padded.num_slots == (4, 0)
    drawn = model.draw("cross", {"a": 1, "b": 1})
    found = model.runtime.forward("cross", torch.cat([drawn.query, drawn.query]))
    assert_close(found[:2], drawn.expected, 1e-5)


# Capture


def test_the_metadata_of_a_capture_is_a_uniform_batch_that_fits_every_length():
    model = served()
    metadata = state_of(model).metadata_for_capture(4, 2)
    assert metadata.keys() == {"0", "1"}
    for made in metadata.values():
        common = made.common
        assert made.captured
        assert (common.num_reqs, common.num_actual_tokens, common.max_query_len) == (4, 8, 2)
        assert common.max_seq_len == LONGEST
        assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist() == [0, 2, 4, 6, 8]
        assert common.seq_lens.tolist() == [1] * 4
        assert common.seq_lens_host.tolist() == [LONGEST] * 4
        assert not common.seq_lens_host_exact
        assert common.slot_mapping.tolist() == [-1] * 8
        assert common.causal
    tables = [made.common.block_table_tensor.data_ptr() for made in metadata.values()]
    assert len(set(tables)) == 2


def test_the_metadata_of_a_cross_layer_has_the_longest_encoder_sequence():
    _, state = encoder_decoder()
    common = state.metadata_for_capture(2)["cross"].common
    assert common.max_seq_len == 40
    assert common.seq_lens.tolist() == common.seq_lens_host.tolist() == [40, 40]
    assert common.slot_mapping.numel() == 0
    assert not common.causal


def test_a_decoder_of_cross_layers_alone():
    model = served({"cross": CROSS}, max_encoder_len=40)
    state = state_of(model, max_encoder_len=40)
    assert state.metadata_for_capture(2)["cross"].common.seq_lens.tolist() == [40, 40]


def test_layers_run_inside_a_capture_and_write_nothing():
    model = served()
    state = state_of(model)
    model.add("a")
    model.step(a=20)
    before = {name: cache.clone() for name, cache in model.runtime.kv_caches.items()}
    with state.capture(4, 2) as metadata:
        assert metadata["0"].captured
        for name in ("0", "1"):
            rows = torch.ones(8, 4, 8), torch.ones(8, 2, 8), torch.ones(8, 2, 8)
            assert model.runtime.forward(name, *rows).shape == (8, 4, 8)
    assert all(torch.equal(cache, before[name]) for name, cache in model.runtime.kv_caches.items())
    model.step(a=1)


def test_no_step_is_begun_after_a_capture_even_one_that_raised():
    model, state = encoder_decoder()
    with pytest.raises(RuntimeError, match="capture failed"), state.capture(2):
        raise RuntimeError("capture failed")
    with pytest.raises(BatchError, match="has no step"):
        model.runtime.forward("self", torch.zeros(2, 4, 8))
    buffers = state.get_graph_input_buffers(2)
    assert buffers.encoder_seq_lens is not None
    assert buffers.encoder_seq_lens.tolist() == [1, 1]
