"""Rows attend the slots that they name, by the kernel and by torch alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnplug.ops.paths import paths_into
from attnplug.testing import assert_close, assert_lse_close

PATHS = [[5], [5, 7, 40], [5, 7, 41, 2], [60, 0], list(range(20, 37)), [63]]


def by_torch(*given: Any, **named: Any) -> None:
    paths_into(*given, **named)


def by_triton(*given: Any, **named: Any) -> None:
    pytest.importorskip("triton")
    from attnplug.ops.triton.paths import paths_into

    defaults = {"cap": None, "sinks": None, "scales": (1.0, 1.0)}
    paths_into(*given, **defaults | named)


def expected(
    query: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    scales: Any = (1.0, 1.0),
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row and head after the other, in float64."""
    heads, kv_heads = query.shape[1], pages[0].shape[2]
    outs = torch.empty(len(PATHS), heads, pages[1].shape[3], dtype=torch.float64)
    lses = torch.empty(len(PATHS), heads, dtype=torch.float64)
    k, v = (each.float().double().flatten(0, 1) * by for each, by in zip(pages, scales, strict=True))
    for row, path in enumerate(PATHS):
        for head in range(heads):
            at = head // (heads // kv_heads)
            logits = k[path, at] @ query[row, head].double() * scale
            if cap is not None:
                logits = cap * (logits / cap).tanh()
            sink = logits[:0] if sinks is None else sinks[head : head + 1].double()
            lses[row, head] = torch.cat([logits, sink]).logsumexp(0)
            outs[row, head] = (logits - lses[row, head]).exp() @ v[path, at]
    return outs, lses


@pytest.mark.parametrize("run", [by_torch, by_triton])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "size_v"),
    [(4, 2, 16, 16), (6, 2, 80, 48), (5, 1, 128, 128), (12, 12, 40, 40), (64, 8, 256, 256)],
)
@pytest.mark.parametrize(
    "named",
    [{}, {"cap": 2.0}, {"sinks": True}, {"cap": 30.0, "sinks": True}],
    ids=str,
)
def test_each_row_attends_its_slots(
    device: torch.device,
    run: Callable[..., None],
    heads: int,
    kv_heads: int,
    size: int,
    size_v: int,
    named: dict[str, Any],
) -> None:
    generator = torch.Generator().manual_seed(heads + size)
    # Pages with gaps, and queries and outputs beside other heads: neighbours are NaN, or must stay.
    whole = torch.full((16, 2, 4, kv_heads, size + size_v), math.nan)
    whole[:, 0, :, :, :size] = torch.randn(16, 4, kv_heads, size, generator=generator)
    whole[:, 1, :, :, :size_v] = torch.randn(16, 4, kv_heads, size_v, generator=generator)
    whole = whole.to(device)
    pages = whole[:, 0, :, :, :size], whole[:, 1, :, :, :size_v]
    query = torch.full((9, heads + 1, size), math.nan, device=device)
    query[: len(PATHS), :heads] = torch.randn(len(PATHS), heads, size, generator=generator).to(device)
    if named.get("sinks"):
        # A column of a larger tensor.
        named = {**named, "sinks": torch.randn(heads, 3, generator=generator).to(device)[:, 1]}
    starts = torch.tensor([0, *map(len, PATHS)]).cumsum(0).int().to(device)
    slots = torch.tensor([*itertools.chain(*PATHS)]).to(device)
    output = torch.full((len(PATHS), heads + 2, size_v), 7.0, device=device)
    lse = torch.full((len(PATHS), heads), 7.0, device=device)
    run(query[:, :heads], pages, starts, slots, output[:, :heads], lse, 0.3, **named)
    on_host = {name: each.cpu() if isinstance(each, torch.Tensor) else each for name, each in named.items()}
    right = expected(query[:, :heads].cpu(), tuple(each.cpu() for each in pages), 0.3, **on_host)
    assert_close(output[:, :heads].cpu(), right[0], 5e-6)
    assert_lse_close(lse.cpu(), right[1], 5e-6)
    assert (output[:, heads:] == 7.0).all()


@pytest.mark.parametrize("run", [by_torch, by_triton])
@pytest.mark.parametrize("stored", [torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16])
def test_stored_types_are_read_as_numbers(
    device: torch.device, run: Callable[..., None], stored: torch.dtype
) -> None:
    if run is by_triton and stored is torch.float8_e4m3fn and device.type == "cpu":
        pytest.skip("Triton's interpreter has no E4M3 of torch")
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(16, 4, 2, 32, generator=generator).to(stored) for _ in range(2)]
    query = torch.randn(len(PATHS), 4, 32, generator=generator).bfloat16()
    starts = torch.tensor([0, *map(len, PATHS)]).cumsum(0).int()
    output, lse = torch.empty(len(PATHS), 4, 32, dtype=torch.bfloat16), torch.empty(len(PATHS), 4)
    given = query, tuple(drawn), starts, torch.tensor([*itertools.chain(*PATHS)])
    moved = [
        tuple(x.to(device) for x in each) if isinstance(each, tuple) else each.to(device) for each in given
    ]
    output, lse = output.to(device), lse.to(device)
    by_head = torch.tensor([0.5, 3.0]), torch.tensor([2.0, 0.25])
    for given_scales in ((0.5, 2.0), by_head):
        # Only numbers of 8 bits are multiples of a scale.
        scales: Any = given_scales if stored.itemsize == 1 else (1.0, 1.0)
        of_rows = [each[:, None] if isinstance(each, torch.Tensor) else each for each in scales]
        on_device = [each.to(device) if isinstance(each, torch.Tensor) else each for each in given_scales]
        run(*moved, output, lse, 0.2, scales=tuple(on_device))
        right = expected(query, tuple(drawn), 0.2, scales=of_rows)
        assert_close(output.cpu(), right[0], 8e-3)
        assert_lse_close(lse.cpu(), right[1], 1e-4)
