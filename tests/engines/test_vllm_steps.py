"""What the adapter reads of vLLM's steps and configuration; vLLM itself is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from attnplug import LayerSpec
from attnplug.core.errors import BatchError
from attnplug.integrations.vllm.steps import (
    SeenLayer,
    asked_invariance,
    builder_config,
    for_layer,
    is_of_group,
    translate,
)

LENS = torch.tensor([7, 40, 3], dtype=torch.int32)


def step(**changes: Any) -> SimpleNamespace:
    """A mixed step of three requests, with its tensors on a device whose values nobody can read."""
    starts = torch.tensor([0, 1, 9, 12], dtype=torch.int32)
    fields = {
        "query_start_loc": starts.to("meta"),
        "query_start_loc_cpu": starts,
        "seq_lens": LENS.to("meta"),
        "num_reqs": 3,
        "num_actual_tokens": 12,
        "max_query_len": 8,
        "max_seq_len": 40,
        "block_table_tensor": torch.zeros(3, 4, dtype=torch.int32, device="meta"),
        "slot_mapping": torch.zeros(12, dtype=torch.int64, device="meta"),
        "causal": True,
        "logits_indices_padded": None,
        "num_logits_indices": None,
        "encoder_seq_lens": None,
        "encoder_seq_lens_cpu": None,
        "seq_lens_cpu_upper_bound": LENS,
    }
    return SimpleNamespace(**fields | changes)


def test_a_step_is_read_without_waiting_for_the_device() -> None:
    given = step()
    common = translate(given, exact=True)
    assert common.seq_lens is given.seq_lens
    assert common.block_table_tensor is given.block_table_tensor
    assert common.seq_lens_host is not None
    assert np.shares_memory(common.seq_lens_host, LENS.numpy())
    assert common.seq_lens_host_exact
    assert not translate(given, exact=False).seq_lens_host_exact


def test_lengths_of_requests_cut_at_chunks_are_those_of_the_parts() -> None:
    parts = torch.tensor([32, 8, 7], dtype=torch.int32)
    whole = torch.tensor([40, 7], dtype=torch.int32)
    common = translate(step(seq_lens_cpu_upper_bound=whole, _seq_lens_cpu=parts), exact=True)
    assert common.seq_lens_host is not None
    assert common.seq_lens_host.tolist() == [32, 8, 7]
    common = translate(step(seq_lens_cpu_upper_bound=whole, _seq_lens_cpu=None), exact=True)
    assert common.seq_lens_host is None, "the lengths of other requests are no use"


@pytest.mark.parametrize("queries", [1, 3])
def test_padding_of_a_graph_is_as_long_as_a_decode(queries: int) -> None:
    lens = torch.tensor([7, 40, 0, 0], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32) * queries
    graph = {"num_reqs": 4, "num_actual_tokens": 4 * queries, "max_query_len": queries}
    given = step(query_start_loc_cpu=starts, seq_lens_cpu_upper_bound=lens, **graph)
    common = translate(given, exact=True)
    assert common.query_start_loc_cpu.diff().tolist() == [queries] * 4
    assert common.seq_lens_host is not None
    assert common.seq_lens_host.tolist() == [7, 40, 1, 1]
    assert common.query_start_loc is given.query_start_loc, "no copy to the device"
    assert starts.tolist() == [0, queries, *[2 * queries] * 3], "vLLM's own are as they were"


def test_tokens_of_padding_without_requests_are_nobodys() -> None:
    starts = torch.tensor([0, 1, 9, 12, 12], dtype=torch.int32)
    common = translate(step(query_start_loc_cpu=starts, num_actual_tokens=16), exact=True)
    assert common.query_start_loc_cpu is starts
    empty = step(query_start_loc_cpu=starts, num_reqs=4, seq_lens_cpu_upper_bound=torch.ones(4).int())
    assert translate(empty, exact=True).query_start_loc_cpu is starts


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("rswa_prefix_lens", LENS, "windows with a visible prefix are not served"),
        ("dcp_local_seq_lens", LENS, "no group of ranks shares the tokens"),
        ("causal", torch.ones(3, dtype=torch.bool), "must be a bool: requests that differ are not served"),
    ],
)
def test_what_a_step_asks_for_and_nobody_serves_is_refused(field: str, value: object, words: str) -> None:
    with pytest.raises(BatchError, match=f"{field}.*{words}"):
        translate(step(**{field: value}), exact=True)


def test_an_encoder_has_its_keys_in_the_call() -> None:
    spec = LayerSpec(
        num_heads=2, num_kv_heads=2, head_size=64, attn_type="encoder_only", causal=False, direct_kv=True
    )
    starts = torch.tensor([0, 1, 9, 12], dtype=torch.int32)
    given = step(query_start_loc=starts, slot_mapping=torch.arange(12), block_table_tensor=torch.ones(3, 4))
    common = for_layer(translate(given, exact=True), spec)
    assert (common.causal, common.max_seq_len) == (False, 8)
    assert common.seq_lens.tolist() == [1, 8, 3]
    assert common.slot_mapping.eq(-1).all(), "nothing is written"


def config(**changes: Any) -> SimpleNamespace:
    """A configuration of vLLM with graphs of 1 to 32 tokens."""
    graphs = SimpleNamespace(has_full_cudagraphs=lambda: True)
    fields = {
        "speculative_config": None,
        "scheduler_config": SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=512),
        "model_config": SimpleNamespace(max_model_len=4096),
        "compilation_config": SimpleNamespace(
            cudagraph_mode=graphs, cudagraph_capture_sizes=[1, 2, 4, 8, 16, 24, 32]
        ),
    }
    return SimpleNamespace(**fields | changes)


def test_builders_hear_which_batches_graphs_have() -> None:
    assert builder_config(config(), None, {}).cudagraph_batch_sizes == (1, 2, 4, 8)
    drafts = config(speculative_config=SimpleNamespace(num_speculative_tokens=2))
    made = builder_config(drafts, None, {})
    assert made.cudagraph_batch_sizes == (1, 2, 3, 6, 8), "of three tokens each"
    assert made.num_speculative_tokens == 2
    eager = SimpleNamespace(cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False))
    assert builder_config(config(compilation_config=eager), None, {}).cudagraph_batch_sizes == ()


def test_requests_that_are_cut_at_chunks_are_more() -> None:
    assert builder_config(config(), None, {}).max_num_seqs == 8
    assert builder_config(config(), SimpleNamespace(attention_chunk_size=128), {}).max_num_seqs == 20


def test_a_layer_is_of_the_group_with_its_heads_and_kind() -> None:
    spec = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64)
    group = SimpleNamespace(num_kv_heads=2, head_size=64)
    assert is_of_group(spec, group)
    assert not is_of_group(spec.replace(num_kv_heads=4), group)
    assert not is_of_group(spec.replace(head_size=128), group)


def test_builders_see_the_scales_of_vllms_layers() -> None:
    scale = torch.tensor(0.5)
    layer = SeenLayer(SimpleNamespace(_k_scale=scale), impl := object())
    assert layer._k_scale is scale
    assert layer.impl is impl


@pytest.mark.parametrize("value", [None, "", "0", "1"])
def test_the_batch_invariant_mode_asks_for_bits_that_no_other_request_and_no_cut_changes(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
    assert asked_invariance() == (("batch", "rows") if value == "1" else ())


def test_ranges_of_multimodal_tokens_are_spans_of_the_tokens_in_them() -> None:
    # Tokens 6, 32 to 39 and 0 to 2 of the requests are in the step.
    ranges = {0: [(2, 9)], 1: [(36, 37), (10, 33), (38, 38)], 2: [(5, 8)]}
    common = translate(step(mm_req_doc_ranges=ranges), exact=True)
    assert common.mm_prefix_spans_cpu is not None
    expected = [(2, 10), (10, 34), (10, 34), (0, 0), (0, 0), (36, 38), (36, 38), *[(0, 0)] * 5]
    assert common.mm_prefix_spans_cpu.tolist() == [list(span) for span in expected]
    assert common.mm_prefix_spans is not None
    assert common.mm_prefix_spans.device.type == "meta"


@pytest.mark.parametrize("ranges", [None, {}, {0: [], 1: [(3, 3)]}, {2: [(40, 50)]}], ids=str)
def test_a_step_whose_tokens_are_in_no_range_has_no_spans(ranges: Any) -> None:
    common = translate(step(mm_req_doc_ranges=ranges), exact=True)
    assert common.mm_prefix_spans is None
    assert common.mm_prefix_spans_cpu is None


def test_ranges_that_share_a_token_are_refused() -> None:
    with pytest.raises(BatchError, match=r"mm_req_doc_ranges.*must have no token twice in request 1"):
        translate(step(mm_req_doc_ranges={1: [(3, 6), (6, 9)]}), exact=True)
