"""Multimodal spans go with their tokens through every function that cuts or changes a batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sample_batches import batch

from attnplug.core import AttentionBackend, Device, Feature, LayerSpec
from attnplug.core.batch import (
    UBatchSlice,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    make_local_attention_virtual_batches,
    split_attn_metadata,
)
from attnplug.core.composite.routing import Router
from attnplug.errors import BatchError

TWO = [[0, 0], [0, 0], [1, 3], [1, 3], [3, 5], [3, 5]]
"""A decode, then a prompt of five tokens with two spans next to each other."""


def step(**fields):
    spans = torch.tensor(TWO, dtype=torch.int32)
    return batch([1, 5], [4, 5], mm_prefix_spans=spans, **fields)


def cut(*tokens: int, common=None):
    slices = [UBatchSlice(slice(0, 2), slice(0, tokens[0])), UBatchSlice(slice(1, 2), slice(tokens[0], 6))]
    return split_attn_metadata(slices, step() if common is None else common)


def test_a_composite_cuts_them_between_requests():
    parts = Router(()).split(step(mm_prefix_spans_cpu=torch.tensor(TWO).int()), 1, is_cross=False)
    assert parts.decode is not None
    assert parts.prefill is not None
    assert parts.decode.mm_prefix_spans.tolist() == TWO[:1]
    assert parts.prefill.mm_prefix_spans.tolist() == parts.prefill.mm_prefix_spans_cpu.tolist() == TWO[1:]


def test_a_batch_without_its_padding_has_those_of_its_tokens():
    assert step().unpadded(1, 1).mm_prefix_spans.tolist() == TWO[:1]


def test_micro_batches_cut_between_spans_and_not_inside_of_one():
    first, second = cut(4)
    assert first.mm_prefix_spans.tolist() == TWO[:4]
    assert second.mm_prefix_spans.tolist() == TWO[4:]
    for token in (3, 5):
        with pytest.raises(BatchError, match=f"token_slice={token} cuts a multimodal span"):
            cut(token)


def test_a_cut_between_requests_may_have_equal_spans_on_both_sides():
    common = batch([2, 2], [2, 2], mm_prefix_spans=torch.tensor([[0, 2]] * 4, dtype=torch.int32))
    slices = [UBatchSlice(slice(i, i + 1), slice(2 * i, 2 * i + 2)) for i in range(2)]
    parts = split_attn_metadata(slices, common)
    assert [part.mm_prefix_spans.tolist() for part in parts] == [[[0, 2]] * 2] * 2


def test_a_cut_inside_a_request_needs_the_spans_on_the_host():
    on_device = step().mm_prefix_spans.to("meta")
    common = dataclasses.replace(step(), mm_prefix_spans=on_device)
    with pytest.raises(BatchError, match="mm_prefix_spans_cpu=None is required on the host"):
        cut(4, common=common)


def test_pieces_of_chunks_have_none_because_a_span_may_cross_a_chunk():
    pieces, _ = make_local_attention_virtual_batches(4, step(), 4)
    assert pieces.mm_prefix_spans is None


def test_fast_prefill_takes_those_of_the_wanted_tokens():
    wanted = torch.tensor([5, 0, 4], dtype=torch.int64)
    common = step(logits_indices_padded=wanted, num_logits_indices=3)
    made = make_kv_sharing_fast_prefill_common_attn_metadata(common)
    assert made.mm_prefix_spans.tolist() == [TWO[0], TWO[4], TWO[5]]


def test_cross_attention_has_no_spans():
    class Declares(AttentionBackend):
        features = Feature.MM_PREFIX | Feature.CROSS | Feature.NON_CAUSAL

        @staticmethod
        def get_name() -> str:
            return "DECLARES"

    spec = LayerSpec(num_heads=1, num_kv_heads=1, head_size=8, attn_type="encoder_decoder", mm_prefix=True)
    reasons = Declares.validate_configuration(spec, Device("cpu"))
    assert "mm_prefix" in {reason.code for reason in reasons}
    assert "mm_prefix" not in {
        r.code for r in Declares.validate_configuration(spec.replace(mm_prefix=False), Device("cpu"))
    }
