"""The oracle's multimodal spans worked out by hand, and the traps of the kit's batches."""

from __future__ import annotations

import pytest
import torch

from attnplug.core import LayerSpec
from attnplug.errors import BatchError
from attnplug.testing import direct_batch, paged_batch, request_oracle, visible_keys
from attnplug.testing.pages import default_spans, rows_of_spans

SPEC = LayerSpec(num_heads=1, num_kv_heads=1, head_size=8, dtype="float32", mm_prefix=True)


def seen(spec: LayerSpec, spans: list[tuple[int, int]], tokens: int = 6, new: int | None = None) -> list[str]:
    queries = torch.arange(tokens - (tokens if new is None else new), tokens)
    found = visible_keys(spec, queries, torch.arange(tokens), spans=spans)
    return ["".join("x" if key else "." for key in row) for row in found.tolist()]


def test_a_span_sees_all_of_itself_and_the_text_before_it() -> None:
    assert seen(SPEC, [(1, 4)]) == ["x.....", "xxxx..", "xxxx..", "xxxx..", "xxxxx.", "xxxxxx"]


def test_spans_side_by_side_do_not_see_each_other_ahead() -> None:
    assert seen(SPEC, [(0, 2), (2, 4)]) == ["xx....", "xx....", "xxxx..", "xxxx..", "xxxxx.", "xxxxxx"]


def test_a_span_reaches_past_a_window_and_a_chunk() -> None:
    spans = [(1, 5)]
    windowed = seen(SPEC.replace(sliding_window=2), spans)
    assert windowed == ["x.....", "xxxxx.", ".xxxx.", ".xxxx.", ".xxxx.", "....xx"]
    chunked = seen(SPEC.replace(chunk_size=3), spans)
    assert chunked == ["x.....", "xxxxx.", "xxxxx.", ".xxxx.", ".xxxx.", "...xxx"]


def test_a_span_of_one_token_changes_nothing() -> None:
    assert seen(SPEC, [(2, 3)]) == seen(SPEC, [])


def test_a_span_that_began_before_the_step_is_seen_from_its_beginning() -> None:
    assert seen(SPEC.replace(sliding_window=2), [(1, 5)], new=2) == [".xxxx.", "....xx"]


def test_a_layer_without_the_feature_ignores_spans() -> None:
    assert seen(SPEC.replace(mm_prefix=False), [(0, 6)]) == seen(SPEC, [])


def test_no_spans_are_not_the_same_as_none_given() -> None:
    tokens = torch.zeros(2, 1, 8)
    request_oracle(SPEC, tokens, tokens, tokens, 2, spans=[])
    with pytest.raises(
        BatchError, match="spans=None is required: the layer has mm_prefix; give \\[\\] for text"
    ):
        request_oracle(SPEC, tokens, tokens, tokens, 2)


def test_the_default_spans_are_traps() -> None:
    new, tokens = [40, 40, 5, 1, 0, 4], [40, 60, 9, 7, 3, 2]
    spans = default_spans(new, tokens)
    assert spans[0] == [(0, 10), (10, 18), (21, 22), (23, 39)]
    assert spans[1] == [(21, 31), (31, 39), (41, 42), (43, 60)]
    assert spans[2:] == [[(4, 9)], [], [], [(1, 2)]]
    rows = rows_of_spans(spans, new, tokens).tolist()
    assert rows[:11] == [[0, 10]] * 10 + [[10, 18]]
    assert rows[40:42] == [[0, 0], [21, 31]]
    # Rows of the last request before position 0 are no tokens.
    assert rows[-4:] == [[0, 0], [0, 0], [0, 0], [1, 2]]


def test_batches_have_the_spans_of_the_oracle() -> None:
    given = [[(1, 3)], []]
    for made in (
        paged_batch(SPEC, [3, 1], [3, 8], spans=given),
        direct_batch(SPEC, [3, 1], [3, 8], key_lens=[3, 8], spans=given),
    ):
        assert made.spans == given
        assert made.common.mm_prefix_spans.tolist() == [[0, 0], [1, 3], [1, 3], [0, 0]]
        assert made.common.mm_prefix_spans_cpu.data_ptr() != made.common.mm_prefix_spans.data_ptr()
    assert paged_batch(SPEC.replace(mm_prefix=False), [3], [3]).common.mm_prefix_spans is None


def test_pages_of_a_span_that_began_before_the_step_are_not_dropped() -> None:
    spec = SPEC.replace(sliding_window=2)
    kept = paged_batch(spec, [2], [40], spans=[[(17, 40)]], block_size=8, drop_window=True)
    assert (kept.common.block_table_tensor[0, :5] == 0).tolist() == [True, True, False, False, False]
    dropped = paged_batch(spec, [2], [40], spans=[[(38, 40)]], block_size=8, drop_window=True)
    assert (dropped.common.block_table_tensor[0, :5] == 0).tolist() == [True] * 4 + [False]
