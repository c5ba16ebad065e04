"""Shared bytes of tensors, found from strides alone, against the places of all elements."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.core.errors import BatchError, LayoutError
from attnplug.ops import gather_keys, gather_pages, gather_slots, merge_attn_states, write_kv_cache
from attnplug.ops.shared_memory import byte_span, overlaps_itself, share_memory

BASE = torch.zeros(400)


def places(tensor: torch.Tensor) -> list[int]:
    """The place of each element in its storage."""
    indices = itertools.product(*map(range, tensor.shape))
    steps = tensor.stride()
    return [tensor.storage_offset() + sum(i * s for i, s in zip(at, steps, strict=True)) for at in indices]


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    dims = draw(
        st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12, 24])), max_size=3)
    )
    return BASE.as_strided([size for size, _ in dims], [step for _, step in dims], draw(st.integers(0, 60)))


@settings(max_examples=500)
@given(views(), views())
def test_tensors_share_memory_exactly_if_an_element_is_in_both(
    one: torch.Tensor, other: torch.Tensor
) -> None:
    shared = bool(set(places(one)) & set(places(other)))
    assert share_memory(one, other) == share_memory(other, one) == shared


@settings(max_examples=500)
@given(views())
def test_a_tensor_overlaps_itself_exactly_if_two_elements_are_in_one_place(tensor: torch.Tensor) -> None:
    found = places(tensor)
    assert overlaps_itself(tensor) == (len(set(found)) < len(found))


def test_elements_of_two_sizes_share_bytes() -> None:
    halves = BASE.view(torch.float16)
    assert share_memory(BASE[3:4], halves[7:8])
    assert not share_memory(BASE[3:4], halves[8:9])
    assert byte_span(halves[2:6:2]) == (BASE.data_ptr() + 4, BASE.data_ptr() + 10)


def test_columns_of_one_row_are_apart() -> None:
    packed = torch.zeros(512, 96, 64)
    assert not share_memory(packed[:, :32], packed[:, 32:64])
    assert share_memory(packed[:, :32], packed[:, 31:64])
    assert not share_memory(packed[:, :32], packed[3:9, 32:])


def partials() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.randn(3, 2, 8) for _ in range(2)], [torch.randn(3, 2) for _ in range(2)]


def test_a_merge_may_be_written_to_a_partial_and_not_across_it() -> None:
    outputs, lses = partials()
    expected, expected_lse = merge_attn_states(outputs, lses)
    memory = torch.zeros(4, 2, 8)
    memory[1:] = outputs[0]
    with pytest.raises(BatchError, match=r"output=\(3, 2, 8\) must not be in the memory of outputs\[0\]"):
        merge_attn_states([memory[1:], outputs[1]], lses, memory[:3])
    found, lse = merge_attn_states([memory[1:], outputs[1]], lses, memory[1:], lses[0])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_a_merge_is_not_written_to_the_lses_or_over_itself() -> None:
    outputs, lses = partials()
    both = torch.zeros(3, 2, 8)
    with pytest.raises(BatchError, match=r"must not be in the memory of output"):
        merge_attn_states(outputs, lses, both, both.view(-1)[:6].view(3, 2))
    with pytest.raises(BatchError, match=r"output=.* must not overlap itself"):
        merge_attn_states(outputs, lses, torch.zeros(1, 2, 8).expand(3, 2, 8))
    with pytest.raises(BatchError, match=r"must not overlap itself"):
        merge_attn_states(outputs, lses, torch.zeros(40).as_strided((3, 2, 8), (12, 8, 1)))


def test_pages_are_not_gathered_into_themselves() -> None:
    cache, table = torch.randn(6, 4, 8), torch.tensor([[1, 2]], dtype=torch.int32)
    lens, starts = torch.tensor([0, 3], dtype=torch.int32), torch.tensor([0], dtype=torch.int32)
    with pytest.raises(BatchError, match=r"out=.* must not be in the memory of kv_cache"):
        gather_pages(cache, table, lens, starts, cache[0, :3])
    with pytest.raises(BatchError, match=r"out=.* must not be in the memory of kv_cache"):
        gather_slots(cache, torch.tensor([4, 5, 6]), cache[0, 1:4])
    heads, out = cache[:, :, None], torch.zeros(3, 1, 8)
    with pytest.raises(BatchError, match=r"k_out=.* must not be in the memory of v_out"):
        gather_keys(heads, heads, table, lens, out, out)


def test_keys_and_values_have_pages_of_their_own() -> None:
    cache, rows = torch.zeros(6, 4, 1, 16), torch.randn(2, 1, 8)
    slots = torch.tensor([4, 9])
    write_kv_cache(rows, rows, cache[..., :8], cache[..., 8:], slots)
    with pytest.raises(BatchError, match=r"k_cache=.* must not be in the memory of v_cache"):
        write_kv_cache(rows, rows, cache[..., :8], cache[..., 4:12], slots)
    with pytest.raises(BatchError, match=r"k_cache=.* must not be in the memory of key"):
        write_kv_cache(cache[0, :2, :, :8], rows, cache[..., :8], cache[..., 8:], slots)
    with pytest.raises((BatchError, LayoutError), match=r"k_cache=.* must not overlap itself"):
        write_kv_cache(rows, rows, cache[:1, ..., :8].expand(6, 4, 1, 8), cache[..., 8:], slots)
