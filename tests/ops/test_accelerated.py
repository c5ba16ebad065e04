"""Without triton, tensors on a GPU are served in plain torch."""

from __future__ import annotations

import sys

import pytest
import torch

from attnplug.ops import merge, merge_attn_states, write_kv_cache
from attnplug.ops.triton import triton_ops


@pytest.fixture
def hide_triton(monkeypatch):
    """`hide_triton()`: from here on it cannot be imported."""

    def hide() -> None:
        monkeypatch.setitem(sys.modules, "triton", None)
        triton_ops.cache_clear()

    yield hide
    triton_ops.cache_clear()


def test_without_triton_pages_are_written_in_plain_torch(device, on_gpu, launches_of, hide_triton):
    calls = launches_of("kv_write")
    hide_triton()
    caches = torch.zeros(2, 3, 4, 2, 8, device=device).unbind()
    key = on_gpu(torch.ones(2, 2, 8))
    write_kv_cache(key, 2 * key, *caches, torch.tensor([5, -1], device=device))
    assert [cache.flatten(2).sum(-1).flatten()[5].item() for cache in caches] == [16.0, 32.0]
    assert [cache.sum().item() for cache in caches] == [16.0, 32.0]
    assert calls == []


def test_without_triton_partials_are_merged_in_plain_torch(device, on_gpu, launches_of, hide_triton):
    calls = launches_of("merging")
    hide_triton()
    outs, lses = [torch.full((1, 2, 8), value) for value in (1.0, 3.0)], [torch.zeros(1, 2)] * 2
    found, _ = merge_attn_states([on_gpu(out) for out in outs], [on_gpu(lse) for lse in lses])
    assert torch.equal(found.cpu().as_subclass(torch.Tensor), merge(outs, lses)[0])
    assert calls == []
