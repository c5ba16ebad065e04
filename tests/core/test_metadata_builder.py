"""AttentionMetadataBuilder: thresholds, and what the other ways of building default to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sample_batches import KV_SPEC, RecordingBuilder, batch, builder

from attnplug.core import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder, BuilderConfig


def test_a_builder_keeps_what_it_was_made_with() -> None:
    config = BuilderConfig()
    made = RecordingBuilder(KV_SPEC, ("layers.0", "layers.1"), config, torch.device("cpu"))
    assert (made.kv_cache_spec, made.config, made.device) == (KV_SPEC, config, torch.device("cpu"))
    assert made.layer_names == ["layers.0", "layers.1"]


def test_a_builder_must_build() -> None:
    assert AttentionMetadataBuilder.__abstractmethods__ == {"build"}


def test_a_builder_asks_and_promises_nothing_by_default() -> None:
    made = builder()
    assert (made.reorder_batch_threshold, made.needs_host_seq_lens) == (None, "none")
    assert made.supports_update_block_table is False
    assert made.get_cudagraph_support(made.config, KV_SPEC) is AttentionCGSupport.NEVER


def test_a_declared_support_for_graphs_is_the_answer() -> None:
    class Capturable(RecordingBuilder):
        cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    assert Capturable.get_cudagraph_support(BuilderConfig(), KV_SPEC) is AttentionCGSupport.UNIFORM_BATCH


def test_graph_supports_are_ordered_from_never_to_always() -> None:
    names = ["NEVER", "UNIFORM_SINGLE_TOKEN_DECODE", "UNIFORM_BATCH", "ALWAYS"]
    assert [(support.name, support.value) for support in AttentionCGSupport] == [
        (name, value) for value, name in enumerate(names)
    ]
    assert min(AttentionCGSupport.UNIFORM_BATCH, AttentionCGSupport.ALWAYS).name == "UNIFORM_BATCH"
    assert AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE < AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize(
    ("threshold", "speculative", "spec_as_decode", "ranks", "varlen", "result"),
    [
        (1, 0, False, 1, False, 1),
        (1, 3, False, 1, False, 1),  # drafts are not decodes unless the backend says so
        (1, 0, True, 1, False, 1),
        (1, 3, True, 1, False, 4),  # the token itself and three drafts
        (8, 3, True, 1, False, 8),  # never lowered
        (2, 3, True, 1, False, 4),
        (8, 0, False, 2, False, 1),  # context parallel decodes are single tokens
        (8, 3, True, 2, False, 1),
        (8, 3, True, 2, True, 8),  # unless the backend takes them of any length
        (1, 3, True, 2, True, 4),
        (8, 0, False, 1, True, 8),
        (None, 3, True, 2, False, 1),  # ranks that share a request's KV need its decodes in front
        (None, 3, True, 2, True, None),  # no reordering stays no reordering
        (None, 0, False, 1, False, None),
    ],
)
def test_the_threshold_covers_speculation_and_yields_to_context_parallelism(
    threshold: int | None,
    speculative: int,
    spec_as_decode: bool,
    ranks: int,
    varlen: bool,
    result: int | None,
) -> None:
    config = BuilderConfig(num_speculative_tokens=speculative, decode_context_parallel_size=ranks)
    made = builder(config)
    made._init_reorder_batch_threshold(threshold, spec_as_decode, varlen)
    assert made.reorder_batch_threshold == result


def test_the_threshold_can_be_given_by_its_name() -> None:
    made = builder(BuilderConfig())
    made._init_reorder_batch_threshold(reorder_batch_threshold=7)
    assert made.reorder_batch_threshold == 7


def test_the_threshold_is_one_unless_stated() -> None:
    made = builder(BuilderConfig(num_speculative_tokens=3))
    made._init_reorder_batch_threshold()
    assert made.reorder_batch_threshold == 1
    assert RecordingBuilder.reorder_batch_threshold is None


def test_a_captured_step_is_built_without_a_prefix() -> None:
    common = batch([1], [5])
    built = builder().build_for_cudagraph_capture(common)
    assert (built.common, built.prefix, built.fast) == (common, 0, False)


@pytest.mark.parametrize("draft_index", [0, 3])
def test_a_draft_is_built_fast_and_without_a_prefix(draft_index: int) -> None:
    common = batch([1], [5])
    built = builder().build_for_drafting(common, draft_index)
    assert (built.common, built.prefix, built.fast) == (common, 0, True)


def test_swapping_a_table_without_support_is_an_error_with_the_class_and_the_flag() -> None:
    made = builder()
    built = made.build(0, batch([1], [5]))
    with pytest.raises(TypeError, match=r"RecordingBuilder cannot.*supports_update_block_table is False"):
        made.update_block_table(built, torch.zeros(1, 1), torch.zeros(1))


def test_no_prefix_is_worth_a_cascade_by_default() -> None:
    lens = np.array([1, 1], dtype=np.int32)
    assert builder().use_cascade_attention(4096, lens, 8, 1, False, False, False, 132, 1) is False


def test_metadata_carries_slots() -> None:
    assert "slot_mapping" in AttentionMetadata.__annotations__
    assert builder().build(0, batch([2], [2])).slot_mapping.tolist() == [4, 5]
