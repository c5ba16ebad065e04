"""TRITON reads and writes heads that are 2**31 elements apart and more."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

pytest.importorskip("triton")

from attnplug.backends.triton import TritonBackend, bindings, specialized
from attnplug.backends.triton.launch import Gpu, Specialized
from attnplug.core import Device, LayerSpec
from attnplug.testing import direct_batch, paged_batch
from attnplug.testing.conformance.harness import Harness, Output, blank_output
from attnplug.testing.conformance.mistakes.expectations import difference
from attnplug.testing.conformance.target import Target

STEP = 1 << 30
"""Elements from one head to the next: the third head begins 2**31 after the first."""
SPEC = LayerSpec(num_heads=3, num_kv_heads=3, head_size=16, dtype="float16", block_size=16)


@pytest.fixture
def spread(tmp_path):
    """`spread(tensor)`: a copy of `[..., heads, size]` with heads STEP apart, in a file that stores no zeros."""
    names = (str(tmp_path / f"{number}") for number in itertools.count())

    def place(tensor: torch.Tensor) -> torch.Tensor:
        *outer, heads, size = tensor.shape
        strides = torch.empty(*outer, size, device="meta").stride()
        elements = (heads - 1) * STEP + tensor.numel() // heads
        held = torch.from_file(next(names), shared=True, size=elements, dtype=tensor.dtype)
        return held.as_strided(tensor.shape, (*strides[:-1], STEP, 1)).copy_(tensor)

    return place


@pytest.mark.parametrize(
    ("new", "tokens", "is_whole"),
    [
        ([1, 1], [40, 7], False),
        ([18, 1], [40, 7], True),
        ([18, 2], None, True),
    ],
    ids=["shares", "extend", "keys-given"],
)
def test_heads_past_32_bits(new, tokens, is_whole, spread, monkeypatch):
    monkeypatch.setattr(bindings.BoundLayer, "fills_gpu", lambda *_: is_whole)
    batch = (
        direct_batch(SPEC.replace(direct_kv=True), new, new)
        if tokens is None
        else paged_batch(SPEC, new, tokens)
    )
    blank = blank_output(batch)
    into = Output(spread(blank.output), None)
    far = {"query": spread(batch.query)}
    if batch.kv_cache is None:
        far |= {"key": spread(batch.key), "value": spread(batch.value)}
    else:
        far["kv_cache"] = spread(batch.kv_cache)
    batch = dataclasses.replace(batch, **far)
    target = Target(TritonBackend, Device("cpu"))
    harness = Harness.of(target, batch)
    assert difference(batch, harness.forward(batch, into)) is None


def test_the_kernel_with_specialised_warps_leaves_heads_past_32_bits_to_the_other(monkeypatch):
    monkeypatch.setattr(specialized, "gpu_of", lambda device: Gpu(132, 227 << 10))
    spec = LayerSpec(num_heads=32, num_kv_heads=8, head_size=128)
    keys = torch.empty(1, 8, 128, device="meta")
    names = ("stride_qt", "stride_qh", "stride_ot", "stride_oh")
    launch = Specialized(128, 2, 2)
    values = {**dict.fromkeys(names, 128), "GROUP": 4, "COMPUTE": None, "NUMBERS": 0}
    for step, served in ((1 << 26, True), (1 << 27, False)):
        assert specialized.serves(spec, {**values, "stride_oh": step}, keys, keys, launch) == served
    for step, served in ((1 << 28, True), (1 << 29, False)):
        far = torch.empty_strided(keys.shape, (128, step, 1), device="meta")
        assert specialized.serves(spec, values, keys, far, launch) == served
