"""Partial results as one: against attention over all keys in float64, whatever kernels leave in rows without keys."""

from __future__ import annotations

import pytest
import torch

from attnplug.errors import BatchError
from attnplug.ops import ExchangeBuffers, combine


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("poison", [0.0, torch.nan, torch.inf])
@pytest.mark.parametrize("nothing", [-torch.inf, torch.inf, torch.nan])
def test_shards_combine_to_attention_over_all_keys(size: int, poison: float, nothing: float) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(n, 2, 8, dtype=torch.float64) for n in (3, 7, 7))
    outs, lses = [], []
    # With four ranks, the last one has no key; with fewer, some have several.
    owners = torch.arange(7) % min(size, 3)
    for rank in range(size):
        own = owners == rank
        scores = torch.einsum("thd,shd->ths", query, key[own])
        out = torch.einsum("ths,shd->thd", scores.softmax(-1), value[own])
        lse = torch.logsumexp(scores, -1)
        outs.append(out if own.any() else torch.full_like(out, poison))
        lses.append(lse if own.any() else torch.full_like(lse, nothing))
    found, total = combine(outs, lses)
    scores = torch.einsum("thd,shd->ths", query, key)
    torch.testing.assert_close(found, torch.einsum("ths,shd->thd", scores.softmax(-1), value))
    torch.testing.assert_close(total, torch.logsumexp(scores, -1))
    stacked, same = combine(torch.stack(outs), torch.stack(lses))
    assert torch.equal(stacked, found)
    assert torch.equal(same, total)


def test_a_row_without_keys_on_every_rank_is_zero() -> None:
    out, lse = combine([torch.full((1, 1, 4), torch.nan)] * 2, [torch.full((1, 1), -torch.inf)] * 2)
    assert out.tolist() == [[[0.0] * 4]]
    assert lse.tolist() == [[-torch.inf]]


def test_outputs_of_sixteen_bits_are_weighted_in_thirty_two() -> None:
    out = torch.randn(4, 2, 8).bfloat16()
    found, lse = combine([out, out], [torch.full((4, 2), 88.0), torch.full((4, 2), 88.0)])
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, out)
    assert lse.dtype == torch.float32


def test_a_frozen_buffer_gives_the_same_memory_and_refuses_to_grow() -> None:
    buffers = ExchangeBuffers()
    first = buffers.take("a", (2, 3), torch.float32)
    assert buffers.take("a", (3,), torch.float32).data_ptr() == first.data_ptr()
    buffers.freeze()
    assert buffers.take("a", (6,), torch.int32).shape == (6,)
    with pytest.raises(BatchError, match=r"nbytes=28 is above the 24 bytes of buffer 'a', which is frozen"):
        buffers.take("a", (7,), torch.float32)
    with pytest.raises(BatchError, match="the 0 bytes of buffer 'b'"):
        buffers.take("b", (1,), torch.float32)
    assert buffers.nbytes == 24
