"""Plans of shares belong to their step, buffers that grow stay for graphs, and tiles of launches fit a GPU."""

from __future__ import annotations

import weakref

import pytest
import torch

pytest.importorskip("triton")

from attnplug.backends.triton import TritonBackend, bindings
from attnplug.backends.triton.launch import Gpu, most_rows, partial_sums, prefill_launch, tile_parts
from attnplug.backends.triton.layout import tile_memory
from attnplug.backends.triton.share_launch import share_launch
from attnplug.backends.triton.shares import Shares, SharesPlan, SharesStep
from attnplug.core import LayerSpec
from attnplug.testing import paged_batch, run_batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAN = SharesPlan(16, 4, 1)


class Steps:
    """Shares for two requests, and steps of decodes, numbered one after another."""

    def __init__(self) -> None:
        self.shares = Shares(2, DEVICE)
        self._count = 0

    def next(self, *seq_lens: int) -> SharesStep:
        self._count += 1
        step = SharesStep(
            query_start_loc=torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=DEVICE),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
            num_reqs=len(seq_lens),
            max_query_len=1,
            number=self._count,
        )
        self.shares.begin_step(step)
        return step

    def tiles(self, step: SharesStep) -> torch.Tensor:
        return self.shares.tiles(step, PLAN)


def test_a_plan_that_a_layer_asked_for_once_is_made_again_with_each_step():
    steps = Steps()
    tiles = steps.tiles(steps.next(64, 64))
    assert tiles[:3].tolist() == [0, 4, 8]
    later = steps.next(16, 640)
    assert tiles[:3].tolist() == [0, 1, 41]
    assert steps.tiles(later).data_ptr() == tiles.data_ptr()


def test_a_plan_is_not_made_for_steps_of_another_size_until_a_layer_asks():
    steps = Steps()
    tiles = steps.tiles(steps.next(64, 64))
    later = steps.next(320)
    assert tiles[:3].tolist() == [0, 4, 8]
    assert steps.tiles(later).data_ptr() == tiles.data_ptr()
    assert tiles[:2].tolist() == [0, 20]


def test_steps_larger_than_expected_leave_the_buffers_of_others_alone():
    """A graph captured before reads them: they must be planned still."""
    steps = Steps()
    tiles = steps.tiles(steps.next(64, 64))
    larger = steps.tiles(steps.next(16, 16, 640))
    assert larger.data_ptr() != tiles.data_ptr()
    steps.next(16, 640)
    assert tiles[:3].tolist() == [0, 1, 41]
    assert larger[:4].tolist() == [0, 1, 2, 42]


def test_layers_of_an_earlier_step_are_not_given_the_plan_of_a_later_one():
    steps = Steps()
    first, second = steps.next(64, 64), steps.next(16, 640)
    assert steps.tiles(second)[:3].tolist() == [0, 1, 41]
    assert steps.tiles(first)[:3].tolist() == [0, 4, 8]


def test_what_captured_graphs_may_still_write_to_is_kept_when_buffers_grow():
    shares = Shares(2, DEVICE)
    small = shares.partials(4, 16)
    freed = [weakref.ref(tensor) for tensor in small]
    held = {tensor.data_ptr() for tensor in small}
    del small
    large = shares.partials(16, 16)
    assert all(ref() is not None for ref in freed)
    assert held.isdisjoint(tensor.data_ptr() for tensor in large)


H200, A100, RTX_4090 = Gpu(132, 227 << 10, False, True), Gpu(108, 163 << 10), Gpu(128, 99 << 10)
B200 = Gpu(148, 227 << 10, True)


@pytest.mark.parametrize("gpu", [H200, B200, A100, RTX_4090], ids=["H200", "B200", "A100", "RTX 4090"])
@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("head_size", [16, 64, 80, 128, 192, 256, 288, 384, 512])
def test_tiles_fit_the_shared_memory_of_a_multiprocessor(head_size, itemsize, gpu):
    for rows in (1, 4, 8, 64):
        rows = min(rows, most_rows(head_size, itemsize, gpu))
        decode = share_launch(head_size, itemsize, rows, gpu)
        assert decode.block_n % partial_sums(decode.block_n, decode.block_m, decode.num_warps) == 0
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
    monkeypatch.setattr(bindings, "share_launch", lambda *sizes: asked.append(sizes) or share_launch(*sizes))
    spec = LayerSpec(
        num_heads=2, num_kv_heads=1, head_size=16, dtype="float32", kv_cache_dtype="fp8_e5m2", block_size=16
    )
    batch = paged_batch(spec, [1], [20])
    assert difference(batch, Output(*run_batch(TritonBackend, batch))) is None
    assert {itemsize for _, itemsize, *_ in asked} == {4}


@pytest.mark.parametrize(("head_size", "rows"), [(64, 1), (128, 4), (128, 8), (256, 2)])
def test_what_was_tuned_is_launched_where_it_was_tuned(head_size, rows):
    """The tables fit the GPU that they were measured on, so nothing there is made smaller."""
    roomy = Gpu(132, 1 << 30, False, True)
    for tokens in (rows, 16 * rows):
        assert share_launch(head_size, 2, tokens, H200) == share_launch(head_size, 2, tokens, roomy)
    assert prefill_launch(head_size, 2, 1 << 20, H200) == prefill_launch(head_size, 2, 1 << 20, roomy)
