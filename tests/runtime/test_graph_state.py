"""The buffers of captured graphs, how steps are padded into them, and what is refused before a capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_backends import offered
from graph_backends import GraphBuilder, graph_backend
from model_layers import layer
from served_model import ServedModel

from attnplug import plan
from attnplug.core import AttentionCGSupport, BuilderConfig
from attnplug.core.errors import BatchError
from attnplug.runtime import AttentionRuntime, GraphState, StepBatchBuilder
from attnplug.testing import assert_close

NEVER, SINGLE, UNIFORM, ALWAYS = AttentionCGSupport
FULL = layer(dtype="float32")
SLIDING = layer(dtype="float32", sliding_window=20)
CROSS = layer(dtype="float32", attn_type="encoder_decoder")
LONGEST = 64


def config(**changes: Any) -> BuilderConfig:
    given: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "cudagraph_batch_sizes": (4, 2)}
    return BuilderConfig(**given | changes)


def served(
    specs: Any = None, level: AttentionCGSupport = UNIFORM, debug: bool = False, **asked: Any
) -> ServedModel:
    """A model on a backend whose builders declare `level`; graphs of 2 and 4 requests."""
    with offered(graph_backend(level)):
        return ServedModel(
            specs or {"0": FULL, "1": SLIDING}, config=config(), max_model_len=LONGEST, debug=debug, **asked
        )


def state_of(model: ServedModel, **asked: Any) -> GraphState:
    return GraphState(model.runtime, **{"max_model_len": LONGEST, "max_query_len": 3} | asked)


def encoder_decoder() -> tuple[ServedModel, GraphState]:
    model = served({"self": FULL, "cross": CROSS}, max_encoder_len=40)
    return model, state_of(model, max_encoder_len=40)


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
        with pytest.raises(BatchError, match=f"batch_size={size} must lie in 1 .. 4"):
            state._buffers.front(size, 1)


# A step copied in


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


# What is refused before a capture


def refused(state: GraphState, batch_size: int = 2, query_len: int = 1, *, match: str) -> None:
    with pytest.raises(BatchError, match=match), state.capture(batch_size, query_len):
        pytest.fail("the capture was begun")
    with pytest.raises(BatchError, match=match):
        state.metadata_for_capture(batch_size, query_len)


def test_torch_declares_never_and_is_named():
    runtime = AttentionRuntime(plan({"0": FULL}, "cpu", num_blocks=8), config=config())
    state = GraphState(runtime, LONGEST)
    assert state.support is NEVER
    refused(
        state,
        match=r"batch_size=2 asks to capture UNIFORM_SINGLE_TOKEN_DECODE, and TorchMetadataBuilder of TORCH "
        r"\(layer 0\) declares NEVER; run such batches without a graph",
    )


def test_several_queries_need_more_than_single_token_decodes():
    state = state_of(served(level=SINGLE))
    assert state.support is SINGLE
    assert state.metadata_for_capture(2)
    refused(
        state,
        2,
        3,
        match=r"query_len=3 asks to capture UNIFORM_BATCH, and DeclaringBuilder of GRAPHS \(layer 0\) declares "
        "UNIFORM_SINGLE_TOKEN_DECODE",
    )


def test_the_lowest_level_of_all_builders_counts_and_is_named():
    with offered(graph_backend(ALWAYS), graph_backend(SINGLE, "LESS", 40)):
        model = ServedModel(
            {"0": FULL, "1": SLIDING}, config=config(), debug=False, backend="GRAPHS,sliding=LESS"
        )
    state = state_of(model)
    assert state.support is SINGLE
    refused(state, 2, 2, match=r"DeclaringBuilder of LESS \(layer 1\) declares UNIFORM_SINGLE_TOKEN_DECODE")


def test_a_level_that_depends_on_the_configuration_is_asked_for(monkeypatch):
    def by_speculation(config: BuilderConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        return UNIFORM if config.num_speculative_tokens else NEVER

    monkeypatch.setattr(GraphBuilder, "get_cudagraph_support", staticmethod(by_speculation))
    assert state_of(served()).support is NEVER


def test_a_runtime_in_debug_mode():
    state = state_of(served(debug=True))
    with (
        pytest.raises(BatchError, match=r"runtime.debug=True reads back what layers wrote"),
        state.capture(2),
    ):
        pytest.fail("the capture was begun")


def test_sizes_that_are_not_to_be_captured():
    state = state_of(served())
    refused(state, 3, match="batch_size=3 must be one of config.cudagraph_batch_sizes: 2, 4")
    refused(state, 2, 4, match="query_len=4 must lie in 1 .. 3")
    with pytest.raises(BatchError, match=r"query_len=0 must lie in 1 .. 3"):
        state.get_graph_input_buffers(2, 0)


# What is refused of a step


def prepare(model: ServedModel, state: GraphState, queries: int = 1, size: int = 2, **scheduled: int) -> None:
    state.prepare_graph_input_buffers(state.get_graph_input_buffers(size, queries), model.begin(**scheduled))


def test_more_requests_than_the_graph_has():
    model = served()
    state = state_of(model)
    for name in "abc":
        model.add(name)
    with pytest.raises(BatchError, match="num_reqs=3 must not pass the graph's batch_size=2"):
        prepare(model, state, a=1, b=1, c=1)


def test_a_sequence_longer_than_the_graphs_were_captured_for():
    model = served()
    state = state_of(model, max_model_len=16)
    model.add("a")
    model.step(a=16)
    with pytest.raises(BatchError, match="max_seq_len=17 must not pass max_model_len=16"):
        prepare(model, state, a=1)


@pytest.mark.parametrize("level", [UNIFORM, ALWAYS])
@pytest.mark.parametrize(("queries", "a", "b"), [(1, 1, 2), (3, 1, 4), (1, 4, 4)])
def test_other_queries_than_the_graph_has(level, queries, a, b):
    model = served(level=level)
    state = state_of(model)
    model.add("a")
    model.add("b")
    before = state.get_graph_input_buffers(2).seq_lens.clone()
    with pytest.raises(BatchError, match=rf"query_lens=.*must be the graph's query_len={queries} for every"):
        prepare(model, state, queries, a=a, b=b)
    assert torch.equal(state.get_graph_input_buffers(2).seq_lens, before)


def test_fewer_queries_where_only_uniform_batches_are_supported():
    model = served()
    model.add("a")
    with pytest.raises(BatchError, match=r"query_lens=\[1\] must be the graph's query_len=3"):
        prepare(model, state_of(model), 3, a=1)


def test_encoder_tokens_are_not_written_inside_a_graph():
    model, state = encoder_decoder()
    model.add("a", encoder_len=7)
    with pytest.raises(BatchError, match="num_slots=7 encoder tokens of KV group 1 are written in this step"):
        prepare(model, state, a=1)


def test_a_batch_of_other_kv_groups():
    state = state_of(served({"0": FULL}))
    other = StepBatchBuilder(max_num_seqs=2, max_num_batched_tokens=4, max_model_len=8, block_sizes=[16, 16])
    other.add_request("x", [[1], [2]])
    with pytest.raises(BatchError, match=r"batch=\(2, \[\]\) must be 1 KV groups"):
        state.prepare_graph_input_buffers(state.get_graph_input_buffers(2), other.step(1))


# Making a state


def test_a_configuration_without_sizes():
    runtime = AttentionRuntime(plan({"0": FULL}, "cpu", num_blocks=8))
    with pytest.raises(BatchError, match=r"cudagraph_batch_sizes=\(\) names no size; give AttentionRuntime"):
        GraphState(runtime, LONGEST)


def test_a_model_without_a_longest_sequence():
    with pytest.raises(BatchError, match="max_model_len=None is required"):
        state_of(served(), max_model_len=None)


@pytest.mark.parametrize("queries", [0, LONGEST + 1])
def test_queries_that_no_request_can_have(queries):
    with pytest.raises(BatchError, match=f"max_query_len={queries} must lie in 1 .. {LONGEST}"):
        state_of(served(), max_query_len=queries)


def test_a_plan_without_pages():
    direct = layer(dtype="float32", direct_kv=True)
    runtime = AttentionRuntime(plan({"0": direct}, "cpu"), config=config())
    with pytest.raises(BatchError, match=r"runtime.plan=1 layers keep no pages: nothing to capture"):
        GraphState(runtime, LONGEST)


def test_encoder_lengths_where_they_belong_and_only_there():
    model, _ = encoder_decoder()
    with pytest.raises(BatchError, match="max_encoder_len=0 must be at least 1 with cross-attention"):
        state_of(model)
    with pytest.raises(BatchError, match=r"max_encoder_len=8 must be at least 1 with .*, and 0 without"):
        state_of(served(), max_encoder_len=8)
