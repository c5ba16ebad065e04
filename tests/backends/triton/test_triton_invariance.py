"""Layers on TRITON that ask for equal bits: kernels fold splits of keys at fixed places, whatever the step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
from triton import language as tl
from triton.runtime import interpreter

from attnplug.backends.triton import TritonBackend, backend
from attnplug.backends.triton.kernels import fixed_splits, share_decode
from attnplug.backends.triton.kernels.split_places import (
    even_log,
    most_splits,
    nearest_split,
    split_number,
    split_size,
    split_start,
)
from attnplug.core import Device, LayerSpec
from attnplug.testing import paged_batch, run_batch
from attnplug.testing.conformance.check import Check, CheckSkipped, ConformanceError
from attnplug.testing.conformance.harness import Harness, Output
from attnplug.testing.conformance.mistakes.expectations import difference
from attnplug.testing.conformance.numbers import invariance
from attnplug.testing.conformance.target import Target

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="without a GPU the interpreter runs parts of kernels alone"
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TARGET = Target(TritonBackend, Device.current() if DEVICE == "cuda" else Device("cpu"))
SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, invariance=("batch", "rows", "heads"))


# Where splits are


@triton.jit
def _places(found, keys, EVEN: tl.constexpr, COUNT: tl.constexpr):
    lanes = tl.arange(0, COUNT)
    key = tl.load(keys + lanes)
    even = even_log(key + 1, 1, EVEN)
    number = split_number(key, even)
    tl.store(found + lanes * 5, number)
    tl.store(found + lanes * 5 + 1, split_start(number, even))
    tl.store(found + lanes * 5 + 2, split_size(key, even))
    tl.store(found + lanes * 5 + 3, nearest_split(key, 0, even))
    tl.store(found + lanes * 5 + 4, (1 << even) + lanes * 0)


KEYS = sorted(
    {*range(0, 3000, 37), *(1 << n for n in range(18)), *((1 << n) - 1 for n in range(18)), 300_000}
)


def places(even: bool) -> np.ndarray[Any, Any]:
    count = triton.next_power_of_2(len(KEYS))
    keys = torch.zeros(count, dtype=torch.int32)
    keys[: len(KEYS)] = torch.tensor(KEYS)
    found = torch.zeros(count, 5, dtype=torch.int32)
    _places[(1,)](found, keys, EVEN=even, COUNT=count)
    return found[: len(KEYS)].numpy()


@interpreted
@pytest.mark.parametrize("even", [False, True])
def test_each_key_is_in_its_split(even: bool) -> None:
    for key, (number, start, size, nearest, _) in zip(KEYS, places(even), strict=True):
        assert start <= key < start + size
        assert number + 1 == most_splits(key + 1, even) or even
        assert number < most_splits(key + 1, even)
        assert abs(nearest - key) <= size // 2
        assert nearest in (start, start + size)


@interpreted
def test_splits_by_position_are_as_long_as_their_keys_come_late() -> None:
    sizes = places(False)[:, 2]
    assert set(sizes) == {128, 256, 512, 1024, 2048}
    assert (np.diff(sizes) >= 0).all()


@interpreted
def test_even_splits_are_the_shortest_of_which_there_are_at_most_32() -> None:
    for key, (*_, size) in zip(KEYS, places(True), strict=True):
        assert -(-(key + 1) // size) <= 32
        assert size in (64, 128, 256) or -(-(key + 1) // (size // 2)) > 32


# Bits


def product(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
    """A product whose rows do not depend on their number, as on a GPU; that of numpy has other bits for other numbers."""
    rows = [np.matmul(a.data[at : at + 1], b.data, dtype=d.data.dtype) for at in range(len(a.data))]
    return interpreter.TensorHandle(np.concatenate(rows) + d.data, d.dtype.scalar)


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", product)
        monkeypatch.setattr(backend, "_other_bits", lambda device: None)


def checks() -> dict[str, Check]:
    with pytest.MonkeyPatch.context() as patched:
        if DEVICE == "cpu":
            patched.setattr(backend, "_other_bits", lambda device: None)
        found = {each.id: each for each in invariance.checks(TARGET)}
    # Interpreted kernels are slow, and a GPU runs all of them in the kit.
    some = ("plain", "sliding_window", "sinks", "alibi", "fp8_kv")
    return {name: each for name, each in found.items() if DEVICE == "cuda" or name.endswith(some)}


CHECKS = checks()


@pytest.mark.slow
@pytest.mark.usefixtures("row_by_row")
@pytest.mark.parametrize("check_id", CHECKS)
def test_bits_are_equal_however_a_step_is_made(check_id: str) -> None:
    try:
        CHECKS[check_id]()
    except CheckSkipped as skipped:
        pytest.skip(str(skipped))


@interpreted
@pytest.mark.slow
@pytest.mark.usefixtures("row_by_row")
def test_cuts_between_the_fixed_places_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares cut where the step says, as they do for layers that ask for nothing."""

    def anywhere(key: Any, base: Any, even: Any) -> Any:
        return share_decode.tl.maximum(key, base)

    for module in (share_decode, fixed_splits):
        monkeypatch.setattr(module, "nearest_split", triton.jit(anywhere))
    with pytest.raises(ConformanceError, match=r"invariance batch: request .* have other bits"):
        CHECKS["invariance/batch-plain"]()


STEPS = {
    "few": ([1, 1, 3], [700, 9, 1300]),
    "more": ([40, 1, 200], [260, 600, 200]),
    "none": ([1, 0, 1, 0], [5, 300, 129, 0]),
}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks and window": {"has_sinks": True, "window": (129, 0)},
    "bytes": {"kv_cache_dtype": "fp8", "logits_soft_cap": 20.0},
    "slopes": {"has_alibi": True, "head_size": 80, "head_size_v": 32},
    "wide": {"head_size": 288},
}


@pytest.mark.slow
@pytest.mark.parametrize("words", [("batch",), ("batch", "rows", "heads")], ids="+".join)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("layer", LAYERS)
def test_numbers_are_right(layer: str, step: str, words: tuple[str, ...]) -> None:
    spec = SPEC.replace(**LAYERS[layer], invariance=words)
    batch = paged_batch(spec, *STEPS[step], device=DEVICE)
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None


@pytest.mark.usefixtures("row_by_row")
def test_a_prefix_that_requests_share_is_summed_by_each() -> None:
    asking = SPEC.replace(dtype="float32")
    for spec in (asking.replace(invariance=()), asking):
        batch = paged_batch(spec, [1, 1], [140, 170], block_size=16, device=DEVICE)
        pages = batch.common.block_table_tensor
        pages[1, :4] = pages[0, :4]
        harness = Harness.of(TARGET, batch)
        alone, shared = (
            harness.run(batch, harness.builder.build(prefix, batch.common)).output for prefix in (0, 64)
        )
        assert torch.allclose(alone, shared, atol=1e-5)
        assert torch.equal(alone, shared) == (spec is asking)


# Refusals


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device("cpu"), "NVIDIA's GPUs alone"),
        (Device("rocm", capability=(9, 4)), "NVIDIA's GPUs alone"),
        (Device("cuda", capability=(10, 0)), "not kept on compute capability 10.x"),
        (Device("cuda", capability=(9, 0)), None),
        (Device("cuda", capability=(8, 0)), None),
    ],
    ids=str,
)
def test_equal_bits_are_refused_where_tiles_have_other_products(device: Device, reason: str | None) -> None:
    found = TritonBackend.supports_combination(SPEC, device)
    assert found is None if reason is None else reason in str(found)
    assert TritonBackend.supports_combination(SPEC.replace(invariance=()), device) is None
