"""Partial rows are merged by the list of each row, by the kernel and by torch alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch

from attnplug.core.errors import BatchError
from attnplug.ops import merge, merge_rows
from attnplug.testing import assert_close, assert_lse_close

LISTS = [[3], [0, 5, 7], [], [9, 1], [2, 4, 6, 8, 10], [11]]


def partials(
    heads: int, size: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Twelve partial rows, of which 1 and 11 saw nothing and have NaN, and the lists of six rows."""
    generator = torch.Generator().manual_seed(heads + size)
    outs = torch.randn(12, heads, size, generator=generator).to(dtype)
    lses = 5 * torch.randn(12, heads, generator=generator)
    for unseen in (1, 11):
        outs[unseen], lses[unseen] = math.nan, -math.inf
    lses[5, 0], outs[5, 0] = -math.inf, math.nan
    starts = torch.tensor([0, *map(len, LISTS)]).cumsum(0).int()
    return outs, lses, starts, torch.tensor([*itertools.chain(*LISTS)], dtype=torch.int32)


def by_torch(*given: torch.Tensor | None) -> None:
    from attnplug.ops.merging import rows_into

    rows_into(*given)


def by_triton(*given: torch.Tensor | None) -> None:
    pytest.importorskip("triton")
    from attnplug.ops.triton.merging import rows_into

    rows_into(*given)


@pytest.mark.parametrize("run", [by_torch, by_triton])
@pytest.mark.parametrize(("heads", "size"), [(3, 16), (2, 80), (32, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_is_the_merge_of_its_list(
    device: torch.device, run: Callable[..., None], heads: int, size: int, dtype: torch.dtype
) -> None:
    outs, lses, starts, entries = (each.to(device) for each in partials(heads, size, dtype))
    # Two heads more than are written: neighbours in memory must stay.
    output = torch.full((8, heads + 2, size), 7.0, dtype=dtype, device=device)
    output_lse = torch.full((8, heads), 7.0, device=device)
    run(outs, lses, starts, entries, output[:, :heads], output_lse)
    for row, members in enumerate(LISTS):
        found = output[row, :heads].cpu()
        if not members or members == [11]:
            assert (found == 0).all()
            assert (output_lse[row] == -math.inf).all()
            continue
        expected, lse = merge(
            [outs[i : i + 1].cpu() for i in members], [lses[i : i + 1].cpu() for i in members]
        )
        assert_close(found.float(), expected[0].float(), 8e-3 if dtype is torch.bfloat16 else 1e-5)
        assert_lse_close(output_lse[row].cpu(), lse[0], 1e-5)
    assert (output[6:] == 7).all()
    assert (output[:, heads:] == 7).all()
    assert (output_lse[6:] == 7).all()


@pytest.mark.parametrize("run", [by_torch, by_triton])
def test_the_lse_may_be_left_out(device: torch.device, run: Callable[..., None]) -> None:
    given = [each.to(device) for each in partials(2, 16)]
    with_lse, without = torch.zeros(2, 6, 2, 16, device=device)
    run(*given, with_lse, torch.empty(6, 2, device=device))
    run(*given, without, None)
    assert torch.equal(with_lse, without)


def test_lists_that_name_no_partial_row_are_refused() -> None:
    outs, lses, starts, entries = partials(2, 16)
    output = torch.empty(6, 2, 16)
    with pytest.raises(BatchError, match="entries"):
        merge_rows(outs, lses, starts, entries + 1, output)
    with pytest.raises(BatchError, match="starts"):
        merge_rows(outs, lses, starts, entries[:-1], output)
    with pytest.raises(BatchError, match="must have at least 6 rows"):
        merge_rows(outs, lses, starts, entries, output[:5])
    with pytest.raises(BatchError, match="memory"):
        merge_rows(outs, lses, starts, entries, outs[:6])
    with pytest.raises(BatchError, match="must end in 1"):
        merge_rows(outs, lses, starts, entries, torch.empty(6, 16, 2).mT)
