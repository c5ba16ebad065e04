"""Caches of any strides, calls that are refused before they write, and tensors that no kernel can read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnplug
from attnplug.core.errors import AttnplugError, BatchError
from attnplug.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache


def ints(*numbers: Any) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


REFUSED = {
    "heads that do not divide": {"q": torch.randn(2, 1, 3, 16)},
    "dtype": {"dtype": torch.float64, "backend": "TRITON"},
    "head size": {"size": 500, "backend": "TRITON"},
    "window": {"window_size": (2**40, 0)},
}


@pytest.mark.parametrize("is_one", [True, False], ids=["one allocation", "two allocations"])
@pytest.mark.parametrize("given", REFUSED.values(), ids=REFUSED)
def test_a_refused_call_writes_nothing(given, is_one):
    given = dict(given)
    backend, size = given.pop("backend", None), given.pop("size", 16)
    dtype = given.pop("dtype", torch.float32)
    made = torch.zeros(2, 2, 32, 2, size, dtype=dtype)
    keys, values = made if is_one else (made[0].clone(), made[1].clone())
    new = torch.ones(2, 1, 2, size, dtype=dtype)
    q = torch.randn(2, 1, 2, size, dtype=dtype)
    with attnplug.use(backend) if backend else torch.no_grad(), pytest.raises(AttnplugError):
        flash_attn_with_kvcache(
            **{"q": q, "k_cache": keys, "v_cache": values, "k": new, "v": new, "cache_seqlens": 3, **given}
        )
    assert not keys.any()
    assert not values.any()


CACHES = {
    "slice of a longer cache": lambda: torch.randn(2, 3, 64, 2, 16)[:, :, :32].unbind(),
    "slice of an odd length": lambda: torch.randn(2, 3, 64, 2, 16)[:, :, 1:32].unbind(),
    "heads before tokens": lambda: torch.randn(2, 3, 2, 32, 16).transpose(2, 3).unbind(),
    "stacked in dimension 1": lambda: torch.randn(3, 2, 32, 2, 16).unbind(1),
    "stacked in dimension 2": lambda: torch.randn(3, 32, 2, 2, 16).unbind(2),
    "stacked in the last dimension": lambda: torch.randn(3, 32, 2, 16, 2).unbind(-1),
    "two allocations": lambda: [torch.randn(3, 64, 2, 16)[:, :32] for _ in range(2)],
    "every other row": lambda: torch.randn(2, 6, 32, 2, 16)[:, ::2].unbind(),
}


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("rows", [None, ints(2, 0)], ids=["in order", "by rows"])
def test_caches_of_any_strides_are_read_and_written_in_place(make, rows):
    keys, values = make()
    dense = [keys.clone().contiguous(), values.clone().contiguous()]
    q, k, v = torch.randn(3, 2, 1, 2, 16).unbind()
    given = {"cache_seqlens": ints(5, 30), "cache_batch_idx": rows}
    assert keys.shape[1] in (31, 32)
    expected = flash_attn_with_kvcache(q, *dense, k, v, **given)
    found = flash_attn_with_kvcache(q, keys, values, k, v, **given)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(keys, dense[0], rtol=0, atol=0)
    torch.testing.assert_close(values, dense[1], rtol=0, atol=0)


def test_an_expanded_cache_is_read_and_never_written():
    one = torch.randn(2, 1, 32, 2, 16)
    keys, values = one.expand(-1, 2, -1, -1, -1).unbind()
    q, new = torch.randn(2, 2, 1, 2, 16).unbind()
    expected = flash_attn_with_kvcache(q, keys.contiguous(), values.contiguous(), cache_seqlens=9)
    torch.testing.assert_close(flash_attn_with_kvcache(q, keys, values, cache_seqlens=9), expected)
    with pytest.raises(BatchError, match="no key can be written"):
        flash_attn_with_kvcache(q, keys, values, new, new, cache_seqlens=9)


def test_caches_without_tokens_give_zeros():
    q, caches = torch.randn(2, 1, 2, 16), torch.randn(2, 2, 8, 2, 16)
    assert not flash_attn_with_kvcache(q, caches[0, :, :0], caches[1, :, :0]).any()
    pool = torch.zeros(2, 0, 4, 2, 16)
    for queries, starts in ((q[:, 0], ints(0, 1, 2)), (torch.randn(6, 2, 16), ints(0, 3, 6))):
        found = flash_attn_varlen_func(
            queries, *pool, starts, ints(0, 0, 0), 3, 0, block_table=torch.zeros(2, 1, dtype=torch.int32)
        )
        assert not found.any()


@pytest.mark.parametrize("backend", ["TORCH"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_changes_no_result(backend, dtype):
    q, k, v = torch.randn(3, 2, 40, 2, 64, dtype=dtype).unbind()
    starts = ints(0, 40, 80)
    caches = torch.stack([k, v])

    def results() -> list[Any]:
        flat = [each.flatten(0, 1) for each in (q, k, v)]
        return [
            flash_attn_func(q, k, v, causal=True),
            flash_attn_varlen_func(*flat, starts, starts, 40, 40),
            flash_attn_with_kvcache(q[:, :1], *caches, cache_seqlens=33),
            flash_attn_with_kvcache(q[:, :3], k, v, causal=True),
        ]

    with attnplug.use(backend):
        expected = results()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = results()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("window", [(2**31 - 1, 0), (2**31 - 1, 2**31 - 1), (2**30 + 1, -1), (-1, 2**31 - 1)])
def test_a_window_past_all_keys_is_no_limit(window):
    q, k, v = torch.randn(3, 2, 9, 2, 16).unbind()
    same = tuple(-1 if side > 9 else side for side in window)
    found, expected = (flash_attn_func(q, k, v, window_size=sides) for sides in (window, same))
    torch.testing.assert_close(found, expected)


def test_slopes_of_one_row_stand_for_all_requests():
    q, k, v = torch.randn(3, 2, 9, 2, 16).unbind()
    slopes = torch.tensor([0.5, 0.25])
    expected = flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    found = flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes[None].expand(2, -1))
    torch.testing.assert_close(found, expected)
    found = flash_attn_func(q[:1], k[:1], v[:1], causal=True, alibi_slopes=slopes[None])
    torch.testing.assert_close(found, expected[:1])
    for wrong in (slopes[None], slopes.repeat(2, 1)):
        with pytest.raises(BatchError, match="alibi_slopes"):
            flash_attn_func(q, k, v, causal=True, alibi_slopes=wrong)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_elements_of_their_own_are_refused_by_name():
    q = torch.randn(2, 4, 2, 16)
    flat, starts = q.flatten(0, 1), ints(0, 4, 8)
    nested = torch.nested.nested_tensor(list(q))
    with pytest.raises(BatchError, match="q='nested'"):
        flash_attn_func(nested, nested, nested)
    with pytest.raises(BatchError, match=r"cu_seqlens_q=.*on meta"):
        flash_attn_varlen_func(flat, flat, flat, starts.to("meta"), starts, 4, 4)
    with pytest.raises(BatchError, match=r"cu_seqlens_k=.*sparse"):
        flash_attn_varlen_func(flat, flat, flat, starts, starts.to_sparse(), 4, 4)
    with pytest.raises(BatchError, match="vmap"):
        torch.vmap(lambda each: flash_attn_func(each, each, each))(q[None])
    with torch.inference_mode():
        caches = torch.zeros(2, 2, 8, 2, 16)
    with pytest.raises(BatchError, match=r"k_cache.*inference mode"):
        flash_attn_with_kvcache(q[:, :1], *caches, q[:, :1], q[:, :1], cache_seqlens=2)
    assert not caches.any()
