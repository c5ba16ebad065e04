"""How decodes are split: every key that is seen belongs to exactly one item, and no item is tiny or too many."""

from __future__ import annotations

import itertools
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from attnplug.backends.triton import TritonBackend, bindings
from attnplug.backends.triton.backend import Options
from attnplug.backends.triton.launch import (
    Gpu,
    decode_launch,
    merging,
    most_rows,
    partial_sums,
    prefill_launch,
    tile_parts,
    tile_side,
)
from attnplug.backends.triton.layout import tile_memory
from attnplug.backends.triton.metadata import TritonMetadata
from attnplug.backends.triton.workspace import SplitPlan, Workspace
from attnplug.core import LayerSpec
from attnplug.ops.reach import Reach
from attnplug.testing import paged_batch, run_batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REACHES = [Reach(-1, 0, 0), Reach(31, 0, 0), Reach(-1, 0, 64), Reach(-1, -1, 0), Reach(15, 7, 0)]


def metadata_of(workspace: Workspace, starts: torch.Tensor, lens: torch.Tensor) -> TritonMetadata:
    """A step of decodes only."""
    reqs = lens.numel()
    longest = int(starts.diff().max())
    sizes = {"num_reqs": reqs, "num_actual_tokens": int(starts[-1]), "num_decodes": reqs}
    return TritonMetadata(
        slot_mapping=starts,
        block_table=starts,
        query_start_loc=starts,
        seq_lens=lens,
        key_start_loc=starts,
        num_decode_tokens=int(starts[-1]),
        max_decode_len=longest,
        max_query_len=0,
        all_new=False,
        causal=True,
        workspace=workspace,
        key_bounds=np.empty(0, np.int32),
        **sizes,
    )


def planned(reach: Reach, query_lens: list[int], seq_lens: list[int], target: int, min_keys: int = 32):
    starts = torch.from_numpy(np.cumsum([0, *query_lens]).astype(np.int32)).to(DEVICE)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
    workspace = Workspace(len(seq_lens), DEVICE)
    plan = SplitPlan(reach.left, reach.right, reach.chunk, target, 16, min_keys)
    items, spans = workspace.items(plan, metadata_of(workspace, starts, lens))
    return items.cpu().numpy(), spans.cpu().numpy()


def seen(reach: Reach, query_len: int, seq_len: int) -> tuple[int, int]:
    first, last = seq_len - query_len, seq_len - 1
    low = max(first - reach.left, 0) if reach.left >= 0 else 0
    high = min(last + reach.right + 1, seq_len) if reach.right >= 0 else seq_len
    if reach.chunk:
        low, high = (
            max(first, 0) // reach.chunk * reach.chunk,
            min(high, (last // reach.chunk + 1) * reach.chunk),
        )
    return low, high


@settings(max_examples=25)
@given(
    reach=st.sampled_from(REACHES),
    lens=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 700)), min_size=1, max_size=9),
    target=st.integers(1, 40),
)
def test_every_key_that_is_seen_belongs_to_one_item(reach, lens, target):
    query_lens = [min(new, total) for new, total in lens]
    seq_lens = [total for _, total in lens]
    items, spans = planned(reach, query_lens, seq_lens, target)

    first = sum(query_lens) * 0
    used = 0
    for request, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        begin, count = spans[request]
        assert begin == used
        assert (count == 0) == (query_len == 0)
        if query_len:
            low, high = seen(reach, query_len, seq_len)
            mine = items[begin : begin + count]
            assert mine[:, :5].tolist() == [[request, part, count, first, query_len] for part in range(count)]
            assert mine[0, 5] == low
            assert mine[-1, 6] == high
            assert (mine[1:, 5] == mine[:-1, 6]).all()
            assert ((mine[:-1, 6] - mine[:-1, 5]) % 16 == 0).all()
            assert (mine[:-1, 6] - mine[:-1, 5] >= 32).all()
        used += count
        first += query_len
    assert used <= len(seq_lens) + target
    assert (items[used:, 2] == 0).all()


def test_one_long_request_among_short_ones_is_split_and_they_are_not():
    _, spans = planned(Reach(-1, 0, 0), [1] * 4, [640, 16, 16, 16], 8)
    assert spans[:, 1].tolist() == [7, 1, 1, 1]


PLAN = SplitPlan(-1, 0, 0, 4, 16, 16)


def step(workspace: Workspace, *seq_lens: int) -> TritonMetadata:
    starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=DEVICE)
    metadata = metadata_of(workspace, starts, torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE))
    workspace.begin_step(metadata)
    return metadata


def test_a_plan_that_a_layer_asked_for_once_is_made_again_with_each_step():
    workspace = Workspace(2, DEVICE)
    items, spans = workspace.items(PLAN, step(workspace, 64, 64))
    later = step(workspace, 16, 128)

    assert spans[:, 1].tolist() == [1, 3]
    again, _ = workspace.items(PLAN, later)
    assert again.data_ptr() == items.data_ptr()


def test_a_plan_is_not_made_for_steps_of_another_size_until_a_layer_asks():
    workspace = Workspace(4, DEVICE)
    _, spans = workspace.items(PLAN, step(workspace, 64, 64))
    later = step(workspace, 16, 16, 128)
    assert spans[:3, 1].tolist() == [2, 2, 0]
    workspace.items(PLAN, later)
    assert spans[:3, 1].tolist() == [1, 1, 3]


def test_steps_larger_than_expected_leave_the_buffers_of_others_alone():
    """A graph captured before reads them: they must be planned still."""
    workspace = Workspace(2, DEVICE)
    _, spans = workspace.items(PLAN, step(workspace, 64, 64))
    _, larger = workspace.items(PLAN, step(workspace, 16, 16, 128))
    assert larger.data_ptr() != spans.data_ptr()
    step(workspace, 16, 128)
    assert spans[:, 1].tolist() == [1, 3]


def test_layers_of_an_earlier_step_are_not_given_the_plan_of_a_later_one():
    workspace = Workspace(2, DEVICE)
    first, second = step(workspace, 64, 64), step(workspace, 16, 128)
    _, spans = workspace.items(PLAN, second)
    assert spans[:, 1].tolist() == [1, 3]
    workspace.items(PLAN, first)
    assert spans[:, 1].tolist() == [2, 2]


def test_what_captured_graphs_may_still_write_to_is_kept_when_buffers_grow():
    workspace = Workspace(2, DEVICE)
    small = workspace.partials(4, 2, 1, 1, 1, 16)
    freed = [weakref.ref(tensor) for tensor in small]
    held = {tensor.data_ptr() for tensor in small}
    del small
    large = workspace.partials(4, 8, 1, 1, 1, 16)
    assert all(ref() is not None for ref in freed)
    assert held.isdisjoint(tensor.data_ptr() for tensor in large)


H200, A100, RTX_4090 = Gpu(132, 227 << 10, False, True), Gpu(108, 163 << 10), Gpu(128, 99 << 10)
B200 = Gpu(148, 227 << 10, True)


@pytest.mark.parametrize("gpu", [H200, B200, A100, RTX_4090], ids=["H200", "B200", "A100", "RTX 4090"])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("head_size", [16, 64, 80, 128, 192, 256, 288, 384, 512])
def test_tiles_fit_the_shared_memory_of_a_multiprocessor(head_size, itemsize, gpu):
    width = tile_side(head_size) * itemsize
    for rows, programs in itertools.product((1, 4, 8, 64), (1, 10_000)):
        rows = min(rows, most_rows(head_size, itemsize, gpu))
        decode = decode_launch(head_size, itemsize, rows, programs, gpu)
        assert (2 * decode.block_n * decode.num_stages + tile_side(rows)) * width <= gpu.shared_memory
        assert decode.min_keys % decode.block_n == 0
        assert decode.block_n % partial_sums(decode.block_n, tile_side(rows), decode.num_warps) == 0
    for rows in (1, 40, 100, 1 << 20):
        prefill = prefill_launch(head_size, itemsize, rows, gpu)
        columns = sum(tile_parts(head_size))
        held = tile_memory(
            prefill.block_m, prefill.block_n, prefill.num_stages, columns, prefill.columns or columns
        )
        assert held * itemsize <= gpu.shared_memory
        assert prefill.block_n % partial_sums(prefill.block_n, prefill.block_m, prefill.num_warps) == 0


def test_float32_decodes_over_fp8_have_tiles_of_float32(monkeypatch):
    """Tiles of bytes were launched, which took 136 KB of shared memory where a GPU has 99."""
    asked = []
    monkeypatch.setattr(
        bindings, "decode_launch", lambda *sizes: asked.append(sizes) or decode_launch(*sizes)
    )
    spec = LayerSpec(
        num_heads=2, num_kv_heads=1, head_size=16, dtype="float32", kv_cache_dtype="fp8_e5m2", block_size=16
    )
    batch = paged_batch(spec, [1], [20])
    assert difference(batch, Output(*run_batch(TritonBackend, batch, options=Options("requests")))) is None
    assert [itemsize for _, itemsize, *_ in asked] == [4]


@pytest.mark.parametrize(("head_size", "rows"), [(64, 1), (128, 4), (128, 8), (256, 2)])
def test_what_was_tuned_is_launched_where_it_was_tuned(head_size, rows):
    for programs in (8, 10_000):
        tuned = decode_launch(head_size, 2, rows, programs, Gpu(132, 1 << 30))
        assert decode_launch(head_size, 2, rows, programs, H200) == tuned
    assert prefill_launch(head_size, 2, 1 << 20, H200) == prefill_launch(
        head_size, 2, 1 << 20, Gpu(132, 1 << 30)
    )


def test_few_rows_are_merged_by_the_last_and_many_in_a_kernel_of_their_own():
    assert merging(4, 8, H200) == "by row"
    assert merging(8, 8, H200) == "later"
    assert merging(8, 512, H200) == "tile"
