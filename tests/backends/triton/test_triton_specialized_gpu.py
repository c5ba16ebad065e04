"""The prefill kernel with specialised warps on Hopper: numbers of heads, lengths and limits, beside the oracle's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from given_keys import new_prompts

from attnplug.backends.triton import TritonBackend, bindings
from attnplug.backends.triton.launch import PrefillLaunch, Specialized
from attnplug.backends.triton.specialized import specialized_kernel
from attnplug.core import LayerSpec
from attnplug.testing import Batch, paged_batch, run_batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference

pytestmark = pytest.mark.gpu

LAUNCHES = {
    128: (Specialized(64, 3, 3), Specialized(128, 2, 2), Specialized(64, 3, 2)),
    192: (Specialized(64, 3, 2), Specialized(64, 2, 2), Specialized(32, 3, 2)),
    256: (Specialized(64, 2, 2), Specialized(32, 3, 2), Specialized(32, 2, 2)),
}
RAGGED = [300, 1, 131, 0, 64, 2000, 17], [300, 90, 131, 3, 700, 2000, 1500]
MANY_OF_TWO_TILES = [64] * 16, [2000 + 31 * index for index in range(16)]
MANY_SHORT = [100] * 64, [100] * 64
LONG = [3000], [3000]


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What BoundLayer binds of the kernel; None where it does not serve."""
    if specialized_kernel(torch.device("cuda", torch.cuda.current_device())) is None:
        pytest.skip("the kernel is for compute capability 9.0")
    found: list[Any] = []
    bind = bindings.BoundLayer._specialized

    def kept(*arguments: Any) -> Any:
        found.append(bind(*arguments))
        return found[-1]

    monkeypatch.setattr(bindings.BoundLayer, "_specialized", kept)
    monkeypatch.setattr(bindings.BoundLayer, "fills_gpu", lambda *_: True)
    return found


def layer(size: int, heads: tuple[int, int] = (8, 2), **fields: Any) -> LayerSpec:
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_size": size, "dtype": "bfloat16"}
    return LayerSpec(**{**sizes, **fields})


def check(batch: Batch, bound: list[Any]) -> None:
    # A second call finds the kernel bound.
    for _ in range(2):
        assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert bound
    assert None not in bound


def launch(monkeypatch: pytest.MonkeyPatch, chosen: Specialized) -> None:
    monkeypatch.setattr(
        bindings, "prefill_launch", lambda *_: PrefillLaunch(128, 64, 8, 2, specialized=chosen)
    )


@pytest.mark.parametrize(
    "lens", [RAGGED, MANY_OF_TWO_TILES, MANY_SHORT, LONG], ids=["ragged", "16", "64", "1"]
)
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("size", [64, 80, 96, 112, 128, 144, 160, 192, 224, 256])
def test_heads_of_any_size(
    size: int,
    number: int,
    lens: tuple[list[int], list[int]],
    bound: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch(monkeypatch, LAUNCHES[min(most for most in LAUNCHES if size <= most)][number])
    check(paged_batch(layer(size), *lens, padding=3, skip_blocks=2, device="cuda"), bound)


@pytest.mark.parametrize("apart", [0, 320])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("size", [64, 80, 96, 112, 128, 144, 160, 192, 224, 256])
def test_keys_of_the_call(
    size: int, number: int, apart: int, bound: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(monkeypatch, LAUNCHES[min(most for most in LAUNCHES if size <= most)][number])
    # Keys and values of the second request are NaN; whole tiles alone, and one key more or less.
    lens = [1024, 300, 128, 0, 1025, 1, 2047, 64]
    limited = layer(size, needs_lse=True, sliding_window=700, has_sinks=True)
    # A window that hides no key.
    for spec in (layer(size), limited, layer(size, sliding_window=2047)):
        check(new_prompts(spec, lens, apart, device="cuda"), bound)


@pytest.mark.parametrize("size", [80, 128, 192, 256])
@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 100},
        {"sliding_window": 700, "has_sinks": True, "needs_lse": True},
        {"chunk_size": 256, "needs_lse": True},
        {"causal": False},
        {"causal": False, "window": (50, 90)},
        {"has_sinks": True},
        {"heads": (7, 1)},
        {"heads": (16, 1), "dtype": "float16"},
        {"heads": (3, 3), "needs_lse": True},
        {"heads": (40, 8)},
        {"heads": (24, 2), "sliding_window": 300, "has_sinks": True, "needs_lse": True},
        {"logits_soft_cap": 5.0},
        {"logits_soft_cap": 30.0, "sliding_window": 700, "has_sinks": True, "needs_lse": True},
        {"invariance": ("batch", "rows"), "sliding_window": 700, "needs_lse": True},
        {"invariance": ("batch",), "logits_soft_cap": 30.0, "has_sinks": True},
    ],
    ids=str,
)
def test_limits_and_groups(fields: dict[str, Any], size: int, bound: list[Any]) -> None:
    check(paged_batch(layer(size, **fields), *RAGGED, block_size=16, device="cuda"), bound)


@pytest.mark.parametrize("block_size", [1, 8, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_any_size(layout: str, block_size: int, bound: list[Any]) -> None:
    check(paged_batch(layer(96), *RAGGED, block_size=block_size, layout=layout, device="cuda"), bound)


def test_batches_of_all_lengths_in_turn(bound: list[Any]) -> None:
    for requests in (1, 2, 5, 11, 23):
        lens = [1 + (requests * 37 + index * 91) % 260 for index in range(requests)]
        check(paged_batch(layer(128), lens, lens, device="cuda"), bound)
        check(paged_batch(layer(128), lens, [each + 300 for each in lens], device="cuda"), bound)
