"""Every new token has a slot of its own, from which its request and position can be told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from batch_strategies import unmodified
from hypothesis import given
from hypothesis import strategies as st

from attnplug.core.batch import compute_slot_mapping, compute_slot_mapping_start_idx, is_block_tables_empty
from attnplug.core.batch.slots import _on_device
from attnplug.core.errors import BatchError

Ints = npt.NDArray[Any]


@st.composite
def tables(draw: st.DrawFn) -> tuple[Ints, Ints, Ints, int]:
    """A table of distinct shuffled blocks, computed and new counts, and the block size."""
    block_size = draw(st.integers(1, 5))
    request = st.tuples(st.integers(0, 12), st.integers(0, 12))
    uniform = draw(st.one_of(st.none(), st.integers(0, 4)))
    drawn = draw(st.lists(request, max_size=6))
    computed = np.array([computed for computed, _ in drawn], dtype=np.int32)
    new = np.array([new if uniform is None else uniform for _, new in drawn], dtype=np.int32)
    width = -(-int((computed + new).max(initial=1)) // block_size) + draw(st.integers(0, 2))
    blocks = np.random.default_rng(draw(st.integers(0, 9))).permutation(len(drawn) * width + 1)[1:]
    return blocks.reshape(len(drawn), width).astype(np.int32), computed, new, block_size


def by_hand(table: Ints, computed: Ints, new: Ints, block_size: int) -> list[int]:
    return [
        int(table[row, position // block_size]) * block_size + position % block_size
        for row in range(len(new))
        for position in range(int(computed[row]), int(computed[row] + new[row]))
    ]


def on_arrays(table: Any, computed: Any, new: Any, block_size: int, **options: Any) -> list[int]:
    slots = compute_slot_mapping(table, computed, new, block_size, **options)
    assert isinstance(slots, np.ndarray)
    assert slots.dtype == np.int64
    return slots.tolist()


def on_tensors(table: Any, computed: Any, new: Any, block_size: int, **options: Any) -> list[int]:
    slots = compute_slot_mapping(*map(torch.from_numpy, (table, computed, new)), block_size, **options)
    assert slots.dtype == torch.int64
    return slots.tolist()


def on_a_device(table: Any, computed: Any, new: Any, block_size: int) -> list[int]:
    tensors = map(torch.from_numpy, (table, computed, new))
    return _on_device(block_size, int(new.sum()), *tensors, None, None).tolist()


@pytest.mark.parametrize("compute", [on_arrays, on_tensors, on_a_device])
@given(tables())
def test_slots_are_those_of_the_table(
    compute: Callable[..., list[int]], drawn: tuple[Ints, Ints, Ints, int]
) -> None:
    with unmodified(*drawn[:3]):
        slots = compute(*drawn)
    assert slots == by_hand(*drawn)


@given(tables())
def test_slots_are_injective_and_lead_back(drawn: tuple[Ints, Ints, Ints, int]) -> None:
    table, computed, new, block_size = drawn
    slots = compute_slot_mapping(table, computed, new, block_size)
    assert len(set(slots.tolist())) == len(slots) == new.sum()
    home = {int(block): (row, column) for (row, column), block in np.ndenumerate(table)}
    back = [
        (home[slot // block_size][0], home[slot // block_size][1] * block_size + slot % block_size)
        for slot in slots.tolist()
    ]
    assert back == [(row, int(computed[row]) + step) for row in range(len(new)) for step in range(new[row])]


@pytest.mark.parametrize("compute", [on_arrays, on_tensors, on_a_device])
@pytest.mark.parametrize("counts", [[1, 1], [2, 2], [2, 1]])
def test_slots_past_32_bits_stay_exact(compute: Callable[..., list[int]], counts: list[int]) -> None:
    table = np.array([[2**27, 2**27 + 1], [2**30, 2**30 + 1]], dtype=np.int32)
    arguments = table, np.array([63, 5], dtype=np.int32), np.array(counts, dtype=np.int32), 64
    assert compute(*arguments) == by_hand(*arguments)
    assert max(compute(*arguments)) > 2**35


@pytest.mark.parametrize("compute", [on_arrays, on_tensors, on_a_device])
def test_a_column_slice_of_a_wider_table_is_read_where_it_lies(compute: Callable[..., list[int]]) -> None:
    wide = np.arange(40, dtype=np.int32).reshape(4, 10)
    arguments = wide[:, 3:7], np.array([3, 0, 1, 7]), np.array([2, 0, 5, 1]), 2
    assert compute(*arguments) == by_hand(*arguments)


@pytest.mark.parametrize("new", [1, 4, None])
def test_a_thousand_requests_at_once(new: int | None) -> None:
    random = np.random.default_rng(2)
    computed = random.integers(0, 100, 1024).astype(np.int32)
    counts = random.integers(0, 30, 1024) if new is None else np.full(1024, new)
    table = random.permutation(1024 * 33).reshape(1024, 33).astype(np.int32)
    assert on_arrays(table, computed, counts, 4) == by_hand(table, computed, counts, 4)


@pytest.mark.parametrize("empty", [None, {}, {"request-0": None, "request-1": None}])
def test_without_tables_no_token_has_a_slot(empty: Any) -> None:
    assert is_block_tables_empty(empty)
    counts = np.array([2, 3])
    assert on_arrays(empty, np.zeros(2, dtype=np.int64), counts, 16) == [-1] * 5
    assert compute_slot_mapping(empty, torch.zeros(2), torch.from_numpy(counts), 16).tolist() == [-1] * 5


def test_a_mapping_with_a_table_is_not_empty() -> None:
    assert not is_block_tables_empty({"request-0": [1]})
    assert not is_block_tables_empty(np.zeros((0, 4)))
    with pytest.raises(BatchError, match="block_table='dict' must be a ndarray, as num_new_tokens is"):
        compute_slot_mapping({"request-0": [1]}, np.array([0]), np.array([1]), 16)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("is_prompt", "query", "context", "window", "start"),
    [
        (True, 10, 0, 4, 6),
        (True, 3, 0, 4, 0),
        (False, 10, 7, 4, 0),
        (True, 10, 0, None, 0),
        (True, 10, 5, 4, 6),
    ],
)
def test_a_prompt_needs_slots_from_its_window_on(
    is_prompt: bool, query: int, context: int, window: int | None, start: int
) -> None:
    assert compute_slot_mapping_start_idx(is_prompt, query, context, window) == start


def test_positions_before_the_start_have_no_slot() -> None:
    table, computed, new = np.array([[5, 6], [7, 8]]), np.array([0, 1]), np.array([4, 2])
    start = np.array([3, 0])
    expected = [-1, -1, -1, 13, 15, 16]
    assert on_arrays(table, computed, new, 2, start_idx=start) == expected
    tensors = [torch.from_numpy(part) for part in (table, computed, new, start)]
    assert compute_slot_mapping(*tensors[:3], 2, start_idx=tensors[3]).tolist() == expected
    assert _on_device(2, 6, *tensors, None).tolist() == expected


def test_padding_past_the_new_tokens_has_no_slot() -> None:
    table, computed, new = np.array([[5, 6], [7, 8]]), np.array([0, 1]), np.array([1, 2])
    expected = [10, 15, 16, -1, -1]
    assert on_arrays(table, computed, new, 2, num_tokens=5) == expected
    tensors = [torch.from_numpy(part) for part in (table, computed, new)]
    assert _on_device(2, 5, *tensors, None, None).tolist() == expected
    nothing = torch.empty(0, dtype=torch.int64)
    assert _on_device(2, 3, nothing.view(0, 4), nothing, nothing, None, None).tolist() == [-1] * 3


def test_slots_are_written_in_place() -> None:
    table, computed, new = np.array([[5, 6]]), np.array([1]), np.array([2])
    out = np.full(4, 99)
    slots = compute_slot_mapping(table, computed, new, 2, out=out)
    assert slots.base is out
    assert out.tolist() == [11, 12, 99, 99]
    tensor = torch.full((4,), 99)
    tensors = [torch.from_numpy(part) for part in (table, computed, new)]
    slots = compute_slot_mapping(*tensors, 2, num_tokens=3, out=tensor)
    assert slots.data_ptr() == tensor.data_ptr()
    assert tensor.tolist() == [11, 12, -1, 99]
    other = torch.full((4,), 99)
    assert _on_device(2, 3, *tensors, None, other).data_ptr() == other.data_ptr()
    assert other.tolist() == [11, 12, -1, 99]


def test_nothing_waits_for_the_device() -> None:
    tensors = [torch.empty(shape, dtype=torch.int32, device="meta") for shape in ((3, 8), (3,), (3,))]
    slots = compute_slot_mapping(*tensors, 16, num_tokens=7)
    assert (slots.shape, slots.dtype, slots.device.type) == ((7,), torch.int64, "meta")
    with pytest.raises(BatchError, match="num_tokens=None is required on a device"):
        compute_slot_mapping(*tensors, 16)


LEAST: dict[str, Any] = {
    "block_table": np.zeros((2, 3), dtype=np.int32),
    "num_computed_tokens": np.array([4, 0]),
    "num_new_tokens": np.array([1, 2]),
    "block_size": 2,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size=0 must be an integer of at least 1"),
        ({"num_new_tokens": np.array([1, -2])}, "num_new_tokens=-2 of request 1 must be at least 0"),
        (
            {"num_computed_tokens": np.array([-4, 0])},
            "num_computed_tokens=-4 of request 0 must be at least 0",
        ),
        ({"num_computed_tokens": np.array([4])}, r"num_computed_tokens=\(1,\) must have the shape .* \(2,\)"),
        ({"start_idx": np.array([4])}, r"start_idx=\(1,\) must have the shape of num_new_tokens, \(2,\)"),
        ({"num_new_tokens": np.zeros((2, 2))}, r"num_new_tokens=\(2, 2\) must have one dimension"),
        ({"block_table": np.zeros(2)}, r"block_table=\(2,\) must be of shape \(2, max_blocks\)"),
        ({"block_table": np.zeros((3, 3))}, r"block_table=\(3, 3\) must be of shape \(2, max_blocks\)"),
        ({"block_table": torch.zeros(2, 3)}, "block_table='Tensor' must be a ndarray, as num_new_tokens is"),
        (
            {"num_new_tokens": np.array([3, 2])},
            "position=6 of request 0 is past its table: 3 blocks of 2 tokens",
        ),
        ({"num_tokens": 2}, "num_tokens=2 must be at least 3, the number of new tokens"),
        ({"out": np.zeros(2, dtype=np.int64)}, r"out='int64 \(2,\)' must be int64 with at least 3 elements"),
        ({"out": np.zeros(3, dtype=np.int32)}, r"out='int32 \(3,\)' must be int64"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        compute_slot_mapping(**{**LEAST, **changes})


@pytest.mark.parametrize(
    "field", ["block_table", "num_computed_tokens", "num_new_tokens", "start_idx", "out"]
)
@pytest.mark.parametrize("of", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_a_list_is_refused_by_the_name_of_its_argument(field: str, of: Callable[[Any], Any]) -> None:
    lists = {
        "block_table": [[3]],
        "num_computed_tokens": [0],
        "num_new_tokens": [1],
        "start_idx": [0],
        "out": [0],
    }
    given = {name: of(value) for name, value in lists.items()} | {field: lists[field]}
    with pytest.raises(BatchError, match=rf"^{field}='list' must be a "):
        compute_slot_mapping(**given, block_size=4)


@pytest.mark.parametrize("field", ["query_len", "context_len", "sliding_window"])
@pytest.mark.parametrize("value", [[4], -1, 1.5])
def test_a_start_is_not_computed_from_what_is_no_count(field: str, value: Any) -> None:
    given: dict[str, Any] = {"query_len": 4, "context_len": 0, "sliding_window": 2, field: value}
    with pytest.raises(BatchError, match=f"^{field}=.* must be an integer of at least"):
        compute_slot_mapping_start_idx(True, **given)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.uint64])
def test_integers_without_a_sign_give_the_same_slots(dtype: Any) -> None:
    table, computed, new = (np.array(values, dtype) for values in ([[3, 4], [5, 6]], [0, 15], [2, 3]))

    assert compute_slot_mapping(table, computed, new, 16).tolist() == [48, 49, 95, 96, 97]


@pytest.mark.parametrize(
    ("index", "field"), [(0, "block_table"), (1, "num_computed_tokens"), (2, "num_new_tokens")]
)
def test_numbers_that_are_no_integers_are_refused(index: int, field: str) -> None:
    arrays = [np.array(values) for values in ([[3, 4], [5, 6]], [0, 15], [2, 3])]
    arrays[index] = arrays[index].astype(np.float32)

    with pytest.raises(BatchError, match=f"{field}='float32' must be of an integer type"):
        compute_slot_mapping(arrays[0], arrays[1], arrays[2], 16)
