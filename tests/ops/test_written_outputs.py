"""Outputs that torch would not let an operation write are refused by name; empty caches give zeros."""

from __future__ import annotations

import pytest
import torch

from attnplug.core.errors import BatchError
from attnplug.ops import gather_keys, gather_pages, gather_slots, merge_attn_states, write_kv_cache

PAGES = torch.randn(2, 4, 2, 16)
TABLE, STARTS = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([0, 4, 8], dtype=torch.int32)
FLAT = PAGES.flatten(0, 1)
WRITERS = {
    "gather_keys": lambda out: gather_keys(PAGES, PAGES, TABLE, STARTS, out, torch.zeros(8, 2, 16)),
    "gather_pages": lambda out: gather_pages(PAGES, TABLE, STARTS, torch.zeros(2, dtype=torch.int32), out),
    "gather_slots": lambda out: gather_slots(PAGES, torch.arange(8), out),
    "merge_attn_states": lambda out: merge_attn_states(
        [FLAT, FLAT], [FLAT[..., 0], FLAT[..., 0]], output=out
    ),
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_an_output_that_torch_would_not_let_us_write(write):
    needing = torch.zeros(8, 2, 16, requires_grad=True)
    with pytest.raises(BatchError, match="requires_grad"):
        write(needing)
    with torch.no_grad():
        write(needing)
    with torch.inference_mode():
        inner = torch.zeros(8, 2, 16)
    with pytest.raises(BatchError, match="inference mode"):
        write(inner)
    with torch.inference_mode():
        write(inner)


def test_keys_are_not_written_to_a_cache_of_inference_mode():
    with torch.inference_mode():
        cache = torch.zeros(2, 1, 8, 2, 16)
    with pytest.raises(BatchError, match=r"k_cache.*inference mode"):
        write_kv_cache(FLAT, FLAT, *cache, torch.arange(8))


@pytest.mark.parametrize("shape", [(0, 4, 2, 16), (3, 0, 2, 16), (0, 0, 2, 16)])
def test_slots_of_no_page_are_zeros(shape):
    found = gather_slots(torch.zeros(shape), torch.full((8,), -1), torch.ones(8, 2, 16))
    assert not found.any()
    with pytest.raises(BatchError, match="slot_mapping=0 is past"):
        gather_slots(torch.zeros(shape), torch.zeros(8, dtype=torch.int64), torch.ones(8, 2, 16))


def test_pages_without_tokens_are_refused():
    with pytest.raises(BatchError, match=r"kv_cache=.*at least one token"):
        gather_pages(PAGES[:, :0], TABLE, STARTS, torch.zeros(2, dtype=torch.int32), torch.ones(8, 2, 16))
