"""Pages of all requests in a row, in torch and in Triton."""

from __future__ import annotations

import pytest
import torch

from attnplug.ops.page_indices import gather_page_indices


def naive(table: torch.Tensor, counts: list[int], rows: list[int]) -> list[int]:
    return [int(page) for row, count in zip(rows, counts, strict=True) for page in table[row, :count]]


CASES = [([3, 0, 5], None), ([1], None), ([2, 4], [2, 0]), ([600, 1], [1, 3]), ([], None)]


@pytest.mark.parametrize(("counts", "rows"), CASES)
@pytest.mark.parametrize("operation", ["torch", "triton"])
def test_each_requests_pages_stand_behind_those_before(
    operation: str, counts: list[int], rows: list[int] | None, request: pytest.FixtureRequest
) -> None:
    device = "cpu" if operation == "torch" else request.getfixturevalue("device")
    table = torch.randint(0, 999, (4, 640), dtype=torch.int32).to(device)
    ends = torch.tensor([0, *counts]).cumsum(0)
    indptr, total = ends.int().to(device), int(ends[-1])
    taken = None if rows is None else torch.tensor(rows, dtype=torch.int32, device=device)
    out = torch.full((total + 3,), -7, dtype=torch.int32, device=device)
    if operation == "torch":
        gather_page_indices(table, indptr, taken, out, total)
    elif counts:
        from attnplug.ops.triton.page_indices import gather_page_indices as launch

        launch(table, indptr, taken, out)
    expected = naive(table.cpu(), counts, list(range(len(counts))) if rows is None else rows)
    assert out.tolist() == [*expected, -7, -7, -7]
