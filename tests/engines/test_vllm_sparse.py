"""The keys that vLLM's indexer picks, as the selection of attnplug's steps; vLLM itself is not needed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import LayerSpec, MLADims, SparseSpec
from attnplug.core.errors import BatchError, SpecError
from attnplug.integrations.vllm.picked_keys import PickedKeys, check_buffer, sparse_of
from attnplug.ops.selection import table_of_tokens
from attnplug.testing import paged_batch, run_batch
from attnplug.testing.batches import Batch
from attnplug.testing.conformance.harness import Output
from attnplug.testing.conformance.mistakes.expectations import difference

DIMS = MLADims(q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=16, v_head_dim=10)
TOPK = SparseSpec("token_topk", 6)
SPEC = LayerSpec(num_heads=2, num_kv_heads=1, head_size=48, mla=DIMS, dtype="float32", sparse=TOPK)
NEW, TOKENS = [1, 0, 4, 5, 1], [30, 9, 40, 5, 1]


def picked(batch: Batch) -> PickedKeys:
    """The batch's keys as vLLM's indexer gives them: -1 in any place of a row, in a buffer of more rows."""
    given, generator = batch.common.selection, torch.Generator().manual_seed(3)
    assert given is not None
    buffer = torch.full((given.counts.shape[0] + 5, TOPK.topk), -1, dtype=torch.int32)
    for row, count in enumerate(given.counts.tolist()):
        places = torch.randperm(TOPK.topk, generator=generator)[: max(count, 0)]
        buffer[row, places] = given.positions[row, : max(count, 0)]
    return PickedKeys.of(buffer)


def with_selection(batch: Batch, selection: PickedKeys) -> Batch:
    return dataclasses.replace(batch, common=batch.common.changed(selection=selection))


@pytest.mark.parametrize("name", ["TORCH", "TRITON"])
def test_backends_leave_out_minus_one_wherever_it_is(name: str) -> None:
    backend: Any = TorchBackend
    if name == "TRITON":
        pytest.importorskip("triton")
        from attnplug.backends.triton import TritonBackend

        backend = TritonBackend
    batch = paged_batch(SPEC, NEW, TOKENS, block_size=16)
    selection = picked(batch)
    assert (selection.positions[:, 0] == -1).any()
    assert difference(batch, Output(*run_batch(backend, with_selection(batch, selection)))) is None
    # A key less is noticed.
    selection.positions[0] = torch.where(
        selection.positions[0] == selection.positions[0].max(), -1, selection.positions[0]
    )
    assert difference(batch, Output(*run_batch(backend, with_selection(batch, selection)))) is not None


def test_a_gpus_kernel_writes_the_pages_of_plain_torch() -> None:
    pytest.importorskip("triton")
    from attnplug.ops.triton import selection as kernels

    batch = paged_batch(SPEC, NEW, TOKENS, block_size=16)
    common, rows, found = batch.common, sum(NEW), []
    for write in (kernels.table_of_tokens, table_of_tokens):
        pages = torch.full((rows, TOPK.topk), 77, dtype=torch.int32)
        counts, ends = pages.new_full((rows,), 77), pages.new_full((rows,), 77)
        places = common.query_start_loc, common.seq_lens, common.block_table_tensor
        write(picked(batch), TOPK, *places, 16, (16, 1), pages, counts, ends)
        found.append([sorted(row[:n]) for row, n in zip(pages.tolist(), counts.tolist(), strict=True)])
    assert found[0] == found[1]
    assert [len(row) for row in found[0]] == batch.common.selection.counts[:rows].tolist()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([0, -1, 0], "comes twice"),
        ([-1, 4, 1], "is past the last of the positions that the query can see"),
        ([-2, 1, -1], "must be at or after 0"),
    ],
)
def test_positions_that_no_indexer_gives_are_refused_on_a_cpu(row: list[int], words: str) -> None:
    selection, ends = PickedKeys.of(torch.tensor([[0, -1, -1], row]).int()), torch.tensor([1, 4])
    with pytest.raises(BatchError, match=words):
        selection.check_values(SparseSpec("token_topk", 3), ends)
    selection.check_values(SparseSpec("token_topk", 3), ends[:1])


def test_views_of_a_step_see_later_writes() -> None:
    buffer = torch.full((4, 3), -1).int()
    step = PickedKeys.of(buffer)[:2]
    assert isinstance(step, PickedKeys)
    buffer[1, 2] = 7
    assert step.positions[1].tolist() == [-1, -1, 7]
    assert step.counts.tolist() == [3, 3]


def test_the_models_configuration_says_how_many_keys_are_picked() -> None:
    plain, sparse = SimpleNamespace(), SimpleNamespace(index_topk=2048)
    for text, whole in ((sparse, plain), (plain, sparse), (SimpleNamespace(index_topk=None), sparse)):
        found = sparse_of(SimpleNamespace(hf_text_config=text, hf_config=whole))
        assert found == SparseSpec("token_topk", 2048)
    with pytest.raises(SpecError, match=r"index_topk=None is not in the model's configuration"):
        sparse_of(SimpleNamespace(hf_text_config=plain, hf_config=plain))


@pytest.mark.parametrize("given", [None, [[1]], torch.zeros(4, 3), torch.zeros(4).int()])
def test_other_buffers_are_refused(given: Any) -> None:
    with pytest.raises(SpecError, match=r"must be an int32 tensor \[tokens, topk\]"):
        check_buffer(given)
    buffer = torch.zeros(4, 3).int()
    assert check_buffer(buffer) is buffer
