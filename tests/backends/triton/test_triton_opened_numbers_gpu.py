"""Prompts over int8 and rotated rows on Hopper: pages that are opened as float16 numbers, beside the oracle's answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attnplug.backends.triton import TritonBackend, bindings
from attnplug.backends.triton.impl import TritonImpl
from attnplug.backends.triton.opened import Opened, PageOpener
from attnplug.backends.triton.specialized import specialized_kernel
from attnplug.core import LayerSpec
from attnplug.ops.kv_codec import bound_codec_write
from attnplug.testing import paged_batch, run_batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference

pytestmark = pytest.mark.gpu

FORMATS = ("int8_token_head", "rotated4")
_OPEN = PageOpener.__call__
RAGGED = [1, 3, 300, 131, 2000, 640], [900, 3, 300, 700, 2000, 5000]
PROMPTS = [700, 1500, 2048], [700, 1500, 2048]
SHORT = [200] * 40, [200] * 40


def layer(name: str, **fields: Any) -> LayerSpec:
    sizes = {"num_heads": 32, "num_kv_heads": 4, "head_size": 128, "dtype": "bfloat16"}
    return LayerSpec(**{**sizes, "kv_cache_dtype": name, **fields})


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Opened]:
    if specialized_kernel(torch.device("cuda", torch.cuda.current_device())) is None:
        pytest.skip("the kernel is for compute capability 9.0")
    found: list[Opened] = []

    def kept(self: PageOpener, *args: Any) -> Any:
        found.append(_OPEN(self, *args))
        return found[-1]

    monkeypatch.setattr(PageOpener, "__call__", kept)
    # The kernel that writes rotated rows rounds one code in a million otherwise than the codec, whose rows the oracle has.
    monkeypatch.setattr(TritonImpl, "_bind_codec", staticmethod(bound_codec_write))
    monkeypatch.setattr(bindings.BoundLayer, "fills_gpu", lambda *_: True)
    return found


@pytest.mark.parametrize("step", [RAGGED, PROMPTS, SHORT], ids=["ragged", "prompts", "short"])
@pytest.mark.parametrize("size", [64, 80, 96, 112, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("name", FORMATS)
def test_heads_of_any_size(
    name: str, size: int, step: tuple[list[int], list[int]], opened: list[Opened]
) -> None:
    batch = paged_batch(layer(name, head_size=size), *step, padding=3, skip_blocks=2, device="cuda")
    # A second call finds the kernels bound.
    for _ in range(2):
        assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert opened
    has_numbers = name == "int8_token_head" or size <= 128
    assert all((each.powers is not None) == has_numbers for each in opened)


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"sliding_window": 700, "has_sinks": True, "needs_lse": True}, {"skip_blocks": 2}),
        ({"chunk_size": 256, "needs_lse": True}, {"block_size": 64}),
        ({"causal": False}, {"numbers": "wide"}),
        ({"has_sinks": True, "needs_lse": True}, {"numbers": "sharp", "layout": "HND"}),
        ({"num_heads": 7, "num_kv_heads": 1}, {"numbers": "far", "block_size": 1}),
    ],
    ids=["window", "chunk", "all", "sinks", "pages of 1"],
)
@pytest.mark.parametrize("name", FORMATS)
def test_limits_and_pages(
    name: str,
    fields: dict[str, Any],
    given: dict[str, Any],
    opened: list[Opened],
) -> None:
    step = [600, 131, 2000], [600, 700, 2000]
    batch = paged_batch(layer(name, **fields), *step, device="cuda", **given)
    for _ in range(2):
        assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert opened
    assert all(each.powers is not None for each in opened)


@pytest.mark.parametrize("name", FORMATS)
def test_equal_bits_again_and_again(name: str, opened: list[Opened]) -> None:
    """Groups of warps write the queries of a tile again, which a wrong order would show now and then."""
    batch = paged_batch(layer(name), [2048] * 4, [2048] * 4, device="cuda")
    first = run_batch(TritonBackend, batch)[0].clone()
    for _ in range(30):
        assert torch.equal(run_batch(TritonBackend, batch)[0], first)
    assert opened
