"""Page tables of chosen keys by a kernel are those of plain torch."""

from __future__ import annotations

import pytest
import torch

from attnplug.core import Selection, SparseSpec
from attnplug.ops import chosen_keys
from attnplug.ops.selection import query_ends, table_of_tokens

pytest.importorskip("triton")

from attnplug.ops.triton import selection as kernels


def step(new: list[int], tokens: list[int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Start locations, lengths, and tables of distinct blocks of 8 tokens."""
    starts = torch.tensor([0, *new]).cumsum(0).int()
    blocks = torch.randperm(12 * len(new), generator=torch.Generator().manual_seed(0)) + 1
    return starts.to(device), torch.tensor(tokens).int().to(device), blocks.view(-1, 12).int().to(device)


@pytest.mark.parametrize("sparse", [SparseSpec("token_topk", 5), SparseSpec("block", 3, 4)], ids=str)
@pytest.mark.parametrize("steps", [(8, 1), (21, 2)], ids=["dense", "apart"])
@pytest.mark.parametrize(
    ("new", "tokens"),
    [([1, 1], [9, 70]), ([4, 0, 3, 0], [4, 5, 33, 8]), ([1, 6], [20, 4])],
    ids=["decode", "mixed", "before-0"],
)
def test_a_row_has_the_visible_keys_that_its_query_chose(device, sparse, steps, new, tokens):
    count, generator = sum(new), torch.Generator().manual_seed(1)
    starts, lens, table = step(new, tokens, device)
    chosen = Selection.allocate(count + 2, 7, "cpu")
    for row in range(count):
        # Some are past the query or before 0, and one more than the layer's topk is counted.
        chosen.positions[row] = torch.randperm(24, generator=generator)[:7].int() - 2
        chosen.counts[row] = [4, 0, 7, -1, 1][row % 5]
    chosen = Selection(chosen.positions.to(device), chosen.counts.to(device))
    requests = torch.arange(len(new)).repeat_interleave(torch.tensor(new)).to(device)
    ends = lens[requests] - starts[requests + 1] + torch.arange(count, device=device) + 1
    found = []
    for module, bounds in (kernels.table_of_tokens, kernels.query_ends), (table_of_tokens, query_ends):
        pages = torch.full((count, 16), 77, dtype=torch.int32, device=device)
        counts = torch.full((count,), 77, dtype=torch.int32, device=device)
        written, before = counts.clone(), counts.clone()
        module(chosen, sparse, starts, lens, table, 8, steps, pages, counts, written)
        bounds(starts, lens, before)
        assert written.tolist() == before.tolist() == ends.clamp(min=0).tolist()
        assert bool((counts <= written).all())
        found.append([sorted(row[:n]) for row, n in zip(pages.tolist(), counts.tolist(), strict=True)])
    assert found[0] == found[1]
    # Both are the keys of `chosen_keys`, each at its place.
    keys, _ = chosen_keys(chosen, sparse, 0 * ends, ends)
    expected = [
        sorted(int(table[r, k // 8]) * steps[0] + k % 8 * steps[1] for k in row if k >= 0)
        for r, row in zip(requests.tolist(), keys.tolist(), strict=True)
    ]
    assert found[1] == expected
    assert any(expected)


def test_more_keys_than_a_program_reads_at_once(device, monkeypatch):
    monkeypatch.setattr(kernels, "_BLOCK", 4)
    starts, lens, table = step([1], [60], device)
    chosen = Selection(torch.arange(60).flip(0)[None].int().to(device), torch.tensor([60]).int().to(device))
    pages = torch.zeros(1, 64, dtype=torch.int32, device=device)
    counts, ends = torch.zeros(2, 1, dtype=torch.int32, device=device)
    sparse = SparseSpec("token_topk", 60)
    kernels.table_of_tokens(chosen, sparse, starts, lens, table, 8, (8, 1), pages, counts, ends)
    assert (counts.tolist(), ends.tolist()) == ([60], [60])
    places = torch.arange(59, -1, -1)
    assert pages[0, :60].tolist() == (table[0].cpu()[places // 8] * 8 + places % 8).tolist()


def test_on_a_gpu_one_kernel_runs(on_gpu, launches_of):
    grids = launches_of("selection")
    starts, lens, table = step([2], [9], torch.device("cpu"))
    chosen = Selection.allocate(2, 4, "cpu")
    pages, counts, ends = (on_gpu(torch.ones(size, dtype=torch.int32)) for size in ((2, 4), (2,), (2,)))
    given = (Selection(on_gpu(chosen.positions), on_gpu(chosen.counts)), SparseSpec("token_topk", 4))
    table_of_tokens(*given, on_gpu(starts), on_gpu(lens), on_gpu(table), 8, (8, 1), pages, counts, ends)
    assert grids == [(2,)]
    assert (counts.tolist(), ends.tolist()) == ([0, 0], [8, 9])
