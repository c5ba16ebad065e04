"""New keys and values, written where their slots say and nowhere else."""

from __future__ import annotations

import pytest
import torch

from attnplug.core.errors import BatchError, LayoutError
from attnplug.ops import write_kv_cache


def pages(
    head_size: int, layout: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of three pages of four tokens and two heads, all -7."""
    shape = (3, 2, 4, 2, head_size) if layout == "NHD" else (3, 2, 2, 4, head_size)
    both = torch.full(shape, -7.0).to(dtype)
    both = both if layout == "NHD" else both.transpose(2, 3)
    return both[:, 0], both[:, 1]


def tokens(count: int, head_size: int, seed: int) -> torch.Tensor:
    return torch.randn(count, 2, head_size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("slots", [[4, 11, 5], [4, -1, 5], [-1, -1, -1], []])
def test_each_token_is_written_to_its_slot_and_nothing_else_changes(layout, slots):
    k_cache, v_cache = pages(8, layout)
    key, value = tokens(len(slots) + 2, 8, 1), tokens(len(slots) + 2, 8, 2)
    write_kv_cache(key, value, k_cache, v_cache, torch.tensor(slots, dtype=torch.int64))
    for cache, given in ((k_cache, key), (v_cache, value)):
        expected = torch.full((12, 2, 8), -7.0)
        for row, slot in enumerate(slots):
            if slot >= 0:
                expected[slot] = given[row]
        assert torch.equal(cache.reshape(12, 2, 8), expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_8_bit_floats_hold_value_by_scale_clamped_to_the_finite(dtype, given):
    k_cache, v_cache = pages(8, "HND", dtype)
    key = torch.tensor([1.0, -1e30]).repeat(2, 4).view(1, 2, 8).to(given)
    before = key.clone()
    write_kv_cache(key, key, k_cache, v_cache, torch.tensor([6]), k_scale=0.5, v_scale=2.0)
    limit = torch.finfo(dtype).max
    assert k_cache[1, 2, 0].float().tolist() == [2.0, -limit] * 4
    assert v_cache[1, 2, 1].float().tolist() == [0.5, -limit] * 4
    assert torch.equal(key, before)


@pytest.mark.parametrize("name", ["key", "value"])
def test_fewer_rows_than_slots_are_refused(name):
    k_cache, v_cache = pages(8, "NHD")
    given = {"key": tokens(3, 8, 1), "value": tokens(3, 8, 2)}
    given[name] = given[name][:2]
    with pytest.raises(BatchError, match=rf"{name}=\(2, 2, 8\) must have a row for each of 3 slots"):
        write_kv_cache(**given, k_cache=k_cache, v_cache=v_cache, slot_mapping=torch.tensor([4, 5, 6]))
    assert (k_cache == -7).all()


def test_raw_bytes_are_refused():
    k_cache, v_cache = (part.view(torch.uint8) for part in pages(8, "NHD", torch.float8_e5m2))
    with pytest.raises(
        LayoutError, match=r"k_cache\.dtype=torch\.uint8 must be a float type; view raw bytes"
    ):
        write_kv_cache(tokens(1, 8, 1), tokens(1, 8, 2), k_cache, v_cache, torch.tensor([4]))
