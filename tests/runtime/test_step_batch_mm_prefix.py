"""Placeholders as spans: a step has those of its tokens, and computes each of them as a whole."""

from __future__ import annotations

import pytest

from attnplug.core.errors import BatchError
from attnplug.runtime import StepBatchBuilder


def builder(**fields) -> StepBatchBuilder:
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 32, "block_sizes": [4]}
    return StepBatchBuilder(**{**limits, "mm_prefix": True, **fields})


def pages(first: int) -> list[list[int]]:
    return [list(range(first, first + 8))]


def spans_of(step) -> list[list[int]]:
    common = step.common
    assert common.mm_prefix_spans.shape == (common.num_actual_tokens, 2)
    assert common.mm_prefix_spans.tolist() == common.mm_prefix_spans_cpu.tolist()
    return common.mm_prefix_spans.tolist()


def test_each_token_has_the_positions_of_its_span():
    made = builder()
    made.add_request("text", pages(1), num_computed_tokens=3)
    made.add_request("a", pages(9), placeholders={"image": [(1, 2), (3, 1)]})
    made.add_request("b", pages(17), num_computed_tokens=4, placeholders={"image": [(1, 3), (5, 2)]})
    assert spans_of(made.step([1, 5, 3])) == [
        *([[0, 0]]),
        *([[0, 0], [1, 3], [1, 3], [3, 4], [0, 0]]),
        *([[0, 0], [5, 7], [5, 7]]),
    ]


def test_text_after_a_step_with_spans_has_zeros_again():
    made = builder()
    made.add_request("a", pages(1), placeholders={"image": [(0, 4)]})
    for count, expected in ((4, [[0, 4]] * 4), (1, [[0, 0]]), (2, [[0, 0]] * 2)):
        # Two rounds: the ring has two sets of buffers.
        assert spans_of(made.step(count)) == expected
        made.finish_step()


def test_spans_follow_a_request_that_the_step_moves():
    made = builder(reorder_batch_thresholds=[1])
    made.add_request("a", pages(1), placeholders={"image": [(0, 2)]})
    made.add_request("b", pages(9), num_computed_tokens=5)
    step = made.step([3, 1])
    assert step.req_ids == ("b", "a")
    assert spans_of(step) == [[0, 0], [0, 2], [0, 2], [0, 0]]


def test_only_the_named_modalities_are_spans():
    made = builder(mm_prefix_modalities=["image"])
    made.add_request("a", pages(1), placeholders={"image": [(0, 2)], "audio": [(2, 2)]})
    step = made.step(3)  # a part of an audio item may be computed
    assert spans_of(step) == [[0, 2], [0, 2], [0, 0]]
    assert set(step.placeholders) == {"image", "audio"}


def test_a_model_without_spans_has_none_in_its_steps():
    made = builder(mm_prefix=False)
    made.add_request("a", pages(1), placeholders={"image": [(0, 4)]})
    assert made.step(2).common.mm_prefix_spans is None


def test_memory_is_profiled_with_text():
    made = builder()
    made.add_request("a", pages(1), placeholders={"image": [(0, 4)]})
    made.step(4)
    made.remove_request("a")
    assert spans_of(made.profile_step(1, 4)) == [[0, 0]] * 4


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((3,), "computes a part of 'image' item 0 at 2 .. 5, .*schedule at most 2 tokens, or at least 6"),
        ((2, 1), "computes a part of 'image' item 0 at 2 .. 5, .*schedule 0 tokens, or at least 4"),
        ((6, 3), "computes a part of 'image' item 1 at 8 .. 9, .*schedule at most 2 tokens, or at least 4"),
    ],
)
def test_a_step_that_cuts_a_span_is_refused_with_the_counts_that_would_be_right(counts, said):
    made = builder()
    made.add_request("a", pages(1), placeholders={"image": [(2, 4), (8, 2)]})
    for count in counts[:-1]:
        made.step(count)
        made.finish_step()
    computed = made.num_computed_tokens_cpu.tolist()
    with pytest.raises(BatchError, match=f"num_scheduled_tokens={counts[-1]} of request a {said}"):
        made.step(counts[-1])
    assert made.num_computed_tokens_cpu.tolist() == computed


def test_a_span_of_which_a_part_was_accepted_cannot_go_on():
    made = builder()
    made.add_request("a", pages(1), placeholders={"image": [(0, 4)]})
    made.step(4)
    made.finish_step([2])
    with pytest.raises(
        BatchError, match="began after the 2 computed tokens: add the request again with at most 0"
    ):
        made.step(2)


@pytest.mark.parametrize("computed", [3, 5])
def test_a_cached_prefix_that_ends_inside_a_span_is_refused(computed):
    made = builder()
    said = rf"num_computed_tokens={computed} must not lie inside .*image'\]\[0\] at 2 .. 5, .*; give 2 or 6"
    with pytest.raises(BatchError, match=said):
        made.add_request("a", pages(1), num_computed_tokens=computed, placeholders={"image": [(2, 4)]})
    assert made.num_reqs == 0
    for whole in (2, 6):
        made.add_request(f"a{whole}", pages(whole), whole, placeholders={"image": [(2, 4)]})


def test_a_span_longer_than_any_step_is_refused_at_once():
    with pytest.raises(BatchError, match="longer than max_num_batched_tokens=16"):
        builder().add_request("a", pages(1), placeholders={"image": [(2, 17)]})
    builder(mm_prefix=False).add_request("a", pages(1), placeholders={"image": [(2, 17)]})


def test_modalities_are_for_builders_of_layers_with_spans():
    with pytest.raises(BatchError, match="mm_prefix_modalities=\\['image'\\] is for builders of layers"):
        builder(mm_prefix=False, mm_prefix_modalities=["image"])
