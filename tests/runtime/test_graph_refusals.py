"""What GraphState refuses: captures beyond the declared level, and steps that fit no graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_backends import offered
from graph_backends import GraphBuilder, graph_backend
from graph_models import (
    ALWAYS,
    FULL,
    LONGEST,
    NEVER,
    SINGLE,
    SLIDING,
    UNIFORM,
    config,
    encoder_decoder,
    served,
    state_of,
)
from model_layers import layer
from served_model import ServedModel

from attnplug import plan
from attnplug.core import AttentionCGSupport, BuilderConfig
from attnplug.core.errors import BatchError
from attnplug.runtime import AttentionRuntime, GraphState, StepBatchBuilder

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
    refused(state, 2, 4, match="query_len=4 must be in 1 .. 3")
    with pytest.raises(BatchError, match=r"query_len=0 must be in 1 .. 3"):
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
    with pytest.raises(BatchError, match=f"max_query_len={queries} must be in 1 .. {LONGEST}"):
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
