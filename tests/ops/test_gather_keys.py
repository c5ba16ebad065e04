"""Keys and values of all requests out of their pages, in torch and in Triton."""

from __future__ import annotations

import pytest
import torch

from attnplug.ops import gather_keys

PAGE = 4
CASES = [[9, 0, 20, 1], [0, 0, 3], [1], [5, 0, 9] * 50, [160]]


@pytest.mark.parametrize("operation", ["torch", "triton"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("size", "size_v"), [(16, 16), (24, 8)])
@pytest.mark.parametrize("tokens", CASES, ids=len)
def test_each_requests_keys_stand_behind_those_before(
    operation: str,
    layout: str,
    size: int,
    size_v: int,
    tokens: list[int],
    request: pytest.FixtureRequest,
) -> None:
    where = "cpu" if operation == "torch" else str(request.getfixturevalue("device"))
    counts = [-(-each // PAGE) for each in tokens]
    order = (torch.randperm(sum(counts)) + 1).int()
    # Rows of a table that has more columns, so that they are not adjacent.
    table = torch.full((len(tokens), max(counts) + 3), 10**6, dtype=torch.int32)[:, 1:]
    for row, pages in enumerate(order.split(counts)):
        table[row, : len(pages)] = pages
    heads = 3
    shape = (sum(counts) + 1, PAGE, heads) if layout == "NHD" else (sum(counts) + 1, heads, PAGE)
    caches = [torch.randn(*shape, d, dtype=torch.bfloat16) for d in (size, size_v)]
    if layout == "HND":
        caches = [cache.transpose(1, 2) for cache in caches]
    expected = [
        torch.cat([cache[table[r, : counts[r]].long()].flatten(0, 1)[:n] for r, n in enumerate(tokens)])
        for cache in caches
    ]
    outs = [
        torch.full((sum(tokens), heads, d), 7.0, dtype=torch.bfloat16, device=where) for d in (size, size_v)
    ]
    ends = torch.tensor([0, *tokens]).cumsum(0).int()
    given = [each.to(where) for each in (*caches, table, ends)]
    if operation == "torch":
        gather_keys(*given, *outs)
    else:
        from attnplug.ops.triton.pages import gather_keys as launch

        launch(*given, *outs)
    for found, right in zip(outs, expected, strict=True):
        assert torch.equal(found.cpu().as_subclass(torch.Tensor), right)


def test_rows_past_the_devices_lengths_are_left(device: str) -> None:
    """If the device has fewer keys than the host counted, no page is read for the rest."""
    from attnplug.ops.triton.pages import gather_keys as launch

    cache = torch.randn(3, PAGE, 2, 16, device=device)
    outs = [torch.full((9, 2, 16), 7.0, device=device) for _ in range(2)]
    table, ends = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([[2, 1]], [0, 6]))
    launch(cache, cache, table, ends, *outs)
    assert outs[0][6:].eq(7).all()
    assert torch.equal(outs[1][:4], cache[2])
