"""Pages of all requests in a row, in torch and in Triton."""

from __future__ import annotations

import pytest
import torch

from attnplug.ops.gather import gather_page_indices

PAGE = 4


def naive(table: torch.Tensor, tokens: list[int], rows: list[int]) -> list[int]:
    return [int(page) for row in rows for page in table[row, : -(-tokens[row] // PAGE)]]


CASES = [
    ([9, 0, 20, 1], None),
    ([1], None),
    ([9, 0, 20, 1], [3, 2]),
    ([9, 0, 20, 1], [0, 1, 2, 3]),
    ([2400, 8, 2399, 1], [2, 0, 3]),
    ([3] * 520, None),
    ([5, 0, 9] * 174, list(range(521, -1, -1))),
    ([], None),
]


def gather(operation: str, *arguments: object) -> None:
    if operation == "torch":
        gather_page_indices(*arguments)  # type: ignore[arg-type]
    else:
        from attnplug.ops.triton.pages import gather_page_indices as launch

        launch(*arguments)  # type: ignore[arg-type]


@pytest.fixture(params=["torch", "triton"])
def operation(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def where(operation: str, request: pytest.FixtureRequest) -> str:
    return "cpu" if operation == "torch" else str(request.getfixturevalue("device"))


@pytest.mark.parametrize(
    ("tokens", "rows", "dtype"), [(*case, torch.int32) for case in CASES] + [(*CASES[2], torch.int64)]
)
def test_each_requests_pages_stand_behind_those_before(
    operation: str, where: str, tokens: list[int], rows: list[int] | None, dtype: torch.dtype
) -> None:
    table = torch.randint(0, 999, (max(len(tokens), 1), 640), dtype=torch.int32)
    expected = naive(table, tokens, list(range(len(tokens))) if rows is None else rows)
    out = torch.full((len(expected) + 3,), -7, dtype=torch.int32, device=where)
    taken = None if rows is None else torch.tensor(rows, dtype=torch.int32, device=where)
    lengths = torch.tensor(tokens, dtype=dtype, device=where)
    if operation == "torch" or expected:
        gather(operation, table.to(where), lengths, PAGE, taken, out, len(expected))
    assert out.tolist() == [*expected, -7, -7, -7]


@pytest.mark.parametrize(("count", "written"), [(4, [1, 2, 11, 12]), (6, [1, 2, 11, 12, 13])])
def test_no_more_than_the_hosts_count_is_written(
    operation: str, where: str, count: int, written: list[int]
) -> None:
    """A captured step is planned for bounds, which the lengths on the device need not reach."""
    table = torch.tensor([[1, 2, 3], [11, 12, 13]], dtype=torch.int32, device=where)
    out = torch.full((8,), -7, dtype=torch.int32, device=where)
    gather(operation, table, torch.tensor([5, 12], device=where), PAGE, None, out, count)
    found = out.tolist()
    assert found[: len(written)] == written
    assert found[count:] == [-7] * (8 - count)


def test_lengths_may_lie_anywhere(operation: str, where: str) -> None:
    table = torch.arange(12, dtype=torch.int32, device=where).view(4, 3)
    lengths = torch.tensor([[5, 0], [1, 0], [9, 0], [2, 0]], dtype=torch.int32, device=where)[:, 0]
    out = torch.full((7,), -7, dtype=torch.int32, device=where)
    gather(operation, table, lengths, PAGE, None, out, 7)
    assert out.tolist() == [0, 1, 3, 6, 7, 8, 9]
