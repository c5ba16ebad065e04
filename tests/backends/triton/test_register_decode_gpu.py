"""The decode loop in registers, on a GPU: formats, heads, lengths and limits, beside the oracle's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import register_cases
from register_cases import FORMATS, LIMITS, kept_launches

from attnplug.backends.triton.registers import runs_registers
from attnplug.testing.drawn_values import Numbers

pytestmark = pytest.mark.gpu

RAGGED = [1] * 9, [300, 1, 131, 64, 2000, 17, 4097, 33, 129]
DRAFTS = [3, 1, 2, 0, 3, 1], [700, 65, 64, 900, 2100, 5]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What BoundLayer asks for."""
    return kept_launches(monkeypatch)


def check(name: str, *given: Any, **fields: Any) -> None:
    if not runs_registers(torch.device("cuda", torch.cuda.current_device()), name):
        pytest.skip(f"the GPU does not open {name} in registers")
    # A second call finds the kernel bound.
    register_cases.check(name, *given, device="cuda", runs=2, **fields)


@pytest.mark.parametrize("heads", [(8, 2, 128), (8, 2, 64), (16, 2, 128), (4, 2, 256), (3, 3, 128)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_heads_of_all_sizes(name: str, heads: tuple[int, int, int], launches: list[Any]) -> None:
    check(name, heads, RAGGED, launches, block_size=64)


@pytest.mark.parametrize("limits", ["plain", *LIMITS])
@pytest.mark.parametrize("name", FORMATS)
def test_limits_of_keys_and_sinks(name: str, limits: str, launches: list[Any]) -> None:
    check(name, (8, 2, 128), RAGGED, launches, block_size=16, **LIMITS.get(limits, {}))


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
