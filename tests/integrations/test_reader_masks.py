"""The pattern of a mask is measured, then held against the mask itself."""

from __future__ import annotations

import pytest
import torch

from attnplug.integrations.reader.mask_pattern import MaskPattern, UnknownMaskError, read_mask

masking = pytest.importorskip("transformers.masking_utils")


@pytest.mark.parametrize("size", [1, 2, 16, 4096, 131072])
def test_a_causal_window_counts_the_query_itself(size):
    assert read_mask(masking.sliding_window_causal_mask_function(size)) == MaskPattern((size - 1, 0))


@pytest.mark.parametrize("size", [0, 1, 64])
def test_a_window_on_both_sides(size):
    mask = masking.sliding_window_bidirectional_mask_function(size)

    assert read_mask(mask) == MaskPattern((size, size))


@pytest.mark.parametrize("size", [2, 3, 100, 8192])
def test_chunks(size):
    mask = masking.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64, device="meta"))

    assert read_mask(mask) == MaskPattern((-1, 0), size)


def test_no_limit_is_minus_one():
    assert read_mask(masking.causal_mask_function) == MaskPattern((-1, 0))
    assert read_mask(masking.bidirectional_mask_function) == MaskPattern((-1, -1))


def test_spans_are_seen_through_to_the_text():
    spans = masking.blockwise_overlay(torch.zeros(1, 8, dtype=torch.int64, device="meta"))

    mask = masking.or_masks(masking.causal_mask_function, spans)

    assert read_mask(mask) == MaskPattern((-1, 0), None, True)


@pytest.mark.parametrize(
    "mask",
    [
        lambda b, h, q, k: (k <= q) & (q - k) % 3 == 0,
        lambda b, h, q, k: (k <= q) & ((q - k < 64) | (k < 4)),
        lambda b, h, q, k: k < q,
        lambda b, h, q, k: (k <= q) & (k % 1000 != 7),
    ],
    ids=["dilated", "window with a global prefix", "without itself", "with holes"],
)
def test_any_other_pattern_is_unknown(mask):
    with pytest.raises(UnknownMaskError):
        read_mask(mask)


def test_a_mask_of_data_is_unknown():
    data = torch.ones(1, 8, dtype=torch.bool, device="meta")

    with pytest.raises(UnknownMaskError, match="padding_mask"):
        read_mask(masking.padding_mask_function(data))
