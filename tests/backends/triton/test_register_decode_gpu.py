"""The decode loop in registers, on a GPU: formats, heads, lengths and limits, beside the oracle's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from attnplug.backends.triton import TritonBackend, bindings
from attnplug.backends.triton.registers import runs_registers
from attnplug.core import LayerSpec
from attnplug.testing import paged_batch, run_batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference
from attnplug.testing.drawn_values import Numbers

pytestmark = pytest.mark.gpu

FORMATS = ("fp8_e4m3", "fp8_e5m2", "int8_token_head", "nvfp4", "rotated4")
RAGGED = [1] * 9, [300, 1, 131, 64, 2000, 17, 4097, 33, 129]
DRAFTS = [3, 1, 2, 0, 3, 1], [700, 65, 64, 900, 2100, 5]
LIMITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 100},
    "sinks": {"has_sinks": True, "needs_lse": True},
    "cap": {"logits_soft_cap": 20.0},
    "chunk": {"chunk_size": 96},
    "sides": {"window": (70, 5), "causal": False},
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What BoundLayer asks for; None where another loop serves."""
    found: list[Any] = []
    asked = bindings.register_launch

    def kept(*arguments: Any) -> Any:
        found.append(asked(*arguments))
        return found[-1]

    monkeypatch.setattr(bindings, "register_launch", kept)
    return found


def check(
    name: str,
    heads: tuple[int, int, int],
    lens: tuple[list[int], list[int]],
    launches: list[Any],
    **fields: Any,
) -> None:
    if not runs_registers(torch.device("cuda", torch.cuda.current_device()), name):
        pytest.skip(f"the GPU does not open {name} in registers")
    drawn = {key: fields.pop(key) for key in ("block_size", "layout", "numbers") if key in fields}
    sizes = dict(zip(("num_heads", "num_kv_heads", "head_size"), heads, strict=True))
    spec = LayerSpec(**{"dtype": "bfloat16", "kv_cache_dtype": name, **sizes, **fields})
    batch = paged_batch(spec, *lens, device="cuda", backend=TritonBackend, padding=2, **drawn)
    # A second call finds the kernel bound.
    for _ in range(2):
        assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert launches
    assert None not in launches


@pytest.mark.parametrize("heads", [(8, 2, 128), (8, 2, 64), (16, 2, 128), (4, 2, 256), (3, 3, 128)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_heads_of_all_sizes(name: str, heads: tuple[int, int, int], launches: list[Any]) -> None:
    check(name, heads, RAGGED, launches, block_size=64)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", FORMATS)
def test_limits_of_keys_and_sinks(name: str, limits: str, launches: list[Any]) -> None:
    check(name, (8, 2, 128), RAGGED, launches, block_size=16, **LIMITS[limits])


@pytest.mark.parametrize("name", FORMATS)
def test_drafts_have_16_rows(name: str, launches: list[Any]) -> None:
    check(name, (8, 2, 128), DRAFTS, launches, block_size=32)


@pytest.mark.parametrize("limits", ["window", "sinks", "cap"])
@pytest.mark.parametrize("name", ["int8_token_head", "rotated4"])
def test_drafts_with_limits(name: str, limits: str, launches: list[Any]) -> None:
    check(name, (8, 2, 64), DRAFTS, launches, block_size=16, **LIMITS[limits])


@pytest.mark.parametrize("name", FORMATS)
def test_float16_layers_in_pages_of_heads(name: str, launches: list[Any]) -> None:
    check(name, (8, 2, 128), RAGGED, launches, block_size=48, layout="HND", dtype="float16")


@pytest.mark.parametrize("numbers", ["far", "sharp", "wide", "strangers"])
@pytest.mark.parametrize("name", FORMATS)
def test_large_and_peaked_numbers(name: str, numbers: str, launches: list[Any]) -> None:
    check(name, (8, 2, 128), RAGGED, launches, block_size=16, numbers=Numbers(numbers))


@pytest.mark.parametrize("name", FORMATS)
def test_many_requests_and_one_long_one(name: str, launches: list[Any]) -> None:
    check(
        name, (8, 2, 128), ([1] * 40, [100 + 7 * at for at in range(39)] + [30000]), launches, block_size=64
    )
