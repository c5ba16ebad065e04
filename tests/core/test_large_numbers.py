"""A large number is served or refused at once: nothing loops over it, and no kernel overflows with it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from sample_backends import Plain

from attnplug import LayerSpec, explain, list_backends
from attnplug.core import MultipleOf
from attnplug.core.interface.answers import HookError, answer
from attnplug.core.reasons import Reason
from attnplug.errors import SpecError
from attnplug.testing import assert_close, paged_batch, run_batch, tolerance

pytestmark = pytest.mark.attack("numbers")

SIZES: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_size": 64}
LONGEST = 2**30


@pytest.mark.parametrize("number", [2**31, 2**64, 10**5000], ids=["2**31", "2**64", "10**5000"])
@pytest.mark.parametrize(
    "field",
    ["num_heads", "num_kv_heads", "head_size", "head_size_v", "block_size", "chunk_size", "sliding_window"],
)
def test_a_size_beyond_32_bits_is_refused_with_its_limit(field: str, number: int) -> None:
    with pytest.raises(SpecError, match=f"^{field}=.{{1,40}} must be an integer of at most [0-9]+$"):
        LayerSpec(**SIZES | {field: number})


@pytest.mark.parametrize("window", [(LONGEST + 1, 0), (0, LONGEST + 1), (10**5000, 0)])
def test_a_window_that_kernels_cannot_add_to_a_position_is_refused(window: tuple[int, int]) -> None:
    with pytest.raises(SpecError, match=r"must not exceed 1073741824; -1 means no limit$"):
        LayerSpec(**SIZES, window=window, causal=False)


@pytest.mark.parametrize("chunk", [LONGEST, LONGEST - 1, 2**29 - 3, 720720])
def test_no_selection_loops_over_a_chunk(chunk: int) -> None:
    """Each candidate for the size of a page was tried up to the chunk: minutes for 2**30."""
    spec, start = LayerSpec(**SIZES, chunk_size=chunk), time.process_time()
    for device in ("cpu", "sm80", "sm90", "sm100"):
        explain(spec, device, assume_installed="all").to_json()
    assert time.process_time() - start < 5


def test_divisors_are_found_in_pairs() -> None:
    for number in (1, 2, 12, 49, 97, 5040):
        expected = tuple(size for size in range(1, number + 1) if number % size == 0)
        assert MultipleOf.dividing(number, (MultipleOf(1),)) == expected
    assert MultipleOf.dividing(LONGEST, (16, 32, MultipleOf(2**28))) == (16, 32, 2**28, 2**29, LONGEST)


def test_a_reason_does_not_count_up_to_a_size() -> None:
    sizes = (*range(8, 257, 8), 2**40)
    assert str(2**40) in Reason("head_size not supported", code="head_size", requested=7, supported=sizes)


@pytest.mark.parametrize(
    "fields",
    [
        {"window": (LONGEST, 0)},
        {"window": (LONGEST, LONGEST), "causal": False},
        {"window": (3, LONGEST), "causal": False},
        {"chunk_size": LONGEST},
    ],
    ids=["left", "both", "right", "chunk"],
)
@pytest.mark.parametrize("name", ["TORCH", "TRITON"])
def test_the_longest_windows_and_chunks_are_computed(name: str, fields: dict[str, Any]) -> None:
    if name == "TRITON":
        pytest.importorskip("triton")
    spec, device = (
        LayerSpec(**SIZES, dtype="float32", **fields),
        "cuda" if torch.cuda.is_available() else "cpu",
    )
    batch = paged_batch(spec, [1, 5], [40, 33], block_size=16, device=device)
    output, _ = run_batch(list_backends()[name], batch)
    assert_close(output, batch.oracle().output, tolerance(batch.spec).output)


@pytest.mark.parametrize("make", [tuple, list, lambda sizes: sizes], ids=["tuple", "list", "range"])
def test_as_many_sizes_as_may_be_declared_are_read_and_one_more_is_refused(make):
    class Many(Plain):
        sizes = make(range(1, 100_001))

        @classmethod
        def get_supported_head_sizes(cls):
            return cls.sizes

    assert len(answer(Many, "get_supported_head_sizes")) == 100_000
    Many.sizes = make(range(1, 100_002))
    with pytest.raises(HookError, match="100000"):
        answer(Many, "get_supported_head_sizes")
