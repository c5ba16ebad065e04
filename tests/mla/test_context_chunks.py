"""The chunks in which computed tokens are expanded: each token once, within the workspace."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.core import Feature, LayerSpec
from attnplug.core.errors import BatchError, SpecError
from attnplug.mla import plan_context_chunks, prefill_workspace_bytes

LENGTHS = st.lists(st.one_of(st.just(0), st.integers(1, 70)), max_size=9)


@settings(max_examples=400, deadline=None)
@given(
    lengths=LENGTHS,
    block_size=st.sampled_from((1, 2, 4, 16)),
    blocks=st.integers(1, 9),
    odd=st.integers(0, 3),
)
def test_each_token_is_in_one_chunk_and_no_chunk_is_too_large(
    lengths: list[int], block_size: int, blocks: int, odd: int
) -> None:
    rows = block_size * blocks + min(odd, block_size - 1)
    seen = [0] * len(lengths)
    chunks = plan_context_chunks(lengths, rows, block_size)
    for chunk in chunks:
        assert 0 < chunk.rows <= rows
        assert len(chunk.starts) == len(chunk.lengths)
        assert chunk.lengths[0]
        assert chunk.lengths[-1]
        assert chunk.continues is (chunk.starts[0] > 0)
        for place, (start, length) in enumerate(zip(chunk.starts, chunk.lengths, strict=True)):
            request = chunk.first + place
            assert start == seen[request]
            # Only the first request of a chunk has tokens in an earlier one.
            assert place == 0 or start == 0
            assert start % block_size == 0
            seen[request] += length
    assert seen == lengths
    needed = sum(lengths)
    assert len(chunks) <= 2 * -(-needed // max(rows // block_size * block_size, 1)) + len(lengths)


def test_requests_without_computed_tokens_are_passed_over() -> None:
    (chunk,) = plan_context_chunks([0, 5, 0, 3, 0], 16, 4)
    assert (chunk.first, chunk.starts, chunk.lengths) == (1, (0, 0, 0), (5, 0, 3))
    assert plan_context_chunks([0, 0], 16, 4) == []


def test_a_long_request_is_cut_at_blocks() -> None:
    chunks = plan_context_chunks([3, 20], 11, 4)
    assert [(each.first, each.starts, each.lengths) for each in chunks] == [
        (0, (0, 0), (3, 8)),
        (1, (8,), (8,)),
        (1, (16,), (4,)),
    ]


@pytest.mark.parametrize(("lengths", "rows"), [([5], 3), ([-1], 8)])
def test_a_workspace_below_a_block_and_negative_lengths_are_refused(lengths: list[int], rows: int) -> None:
    with pytest.raises(BatchError):
        plan_context_chunks(lengths, rows, 4)


def test_the_workspace_holds_latents_keys_and_values() -> None:
    spec = LayerSpec(num_heads=128, **Feature.MLA.fields(576))
    assert prefill_workspace_bytes(spec, 16_384) == 16_384 * 2 * (576 + 128 * (192 + 128))
    with pytest.raises(SpecError, match="mla=None is required"):
        prefill_workspace_bytes(LayerSpec(num_heads=4, num_kv_heads=2, head_size=64), 1)
