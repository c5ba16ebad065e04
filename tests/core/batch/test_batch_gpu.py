"""On a GPU: the same results as on the host, and not one wait."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from batch_strategies import common_of

from attnplug.core import CommonAttentionMetadata
from attnplug.core.batch import (
    UBatchSlice,
    compute_causal_conv1d_metadata,
    compute_slot_mapping,
    get_dcp_local_seq_lens,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    make_local_attention_virtual_batches,
    reshape_query_for_spec_decode,
    split_attn_metadata,
    split_decodes_and_prefills,
    split_decodes_prefills_and_extends,
)

pytestmark = pytest.mark.gpu

DEVICE_FIELDS = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping", "logits_indices_padded")


def waiting(mode: str) -> None:
    """Whether torch raises where the host would wait for the device: "error" or "default"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it may not notice every wait
        torch.cuda.set_sync_debug_mode(mode)


HOST = common_of(
    [1, 1, 9, 20, 33],
    [40, 7, 30, 20, 33],
    logits_indices_padded=torch.tensor([0, 1, 10, 63, 63]),
    num_logits_indices=4,
    seq_lens_host=np.array([40, 7, 30, 20, 33], dtype=np.int32),
)
"""Two decodes, an extend, two prefills."""


@pytest.fixture
def on_gpu() -> Iterator[CommonAttentionMetadata]:
    """The batch on the GPU, and an error for whoever waits for it."""
    common = dataclasses.replace(HOST, **{name: getattr(HOST, name).cuda() for name in DEVICE_FIELDS})
    common.logits_indices_cpu = HOST.logits_indices_padded  # type: ignore[attr-defined]
    waiting("error")
    yield common
    waiting("default")


def same(found: CommonAttentionMetadata, expected: CommonAttentionMetadata) -> None:
    waiting("default")
    for name in DEVICE_FIELDS:
        value, wanted = getattr(found, name), getattr(expected, name)
        assert (value is None) == (wanted is None), name
        if wanted is not None:
            assert value.device.type == "cuda", name
            assert value.cpu().tolist() == wanted.tolist(), name
    assert found.query_start_loc_cpu.tolist() == expected.query_start_loc_cpu.tolist()


def test_splits_do_not_wait(on_gpu: CommonAttentionMetadata) -> None:
    assert split_decodes_and_prefills(on_gpu) == (2, 3, 2, 62)
    assert split_decodes_prefills_and_extends(on_gpu) == (2, 1, 2, 2, 9, 53)


def test_micro_batches_do_not_wait(on_gpu: CommonAttentionMetadata) -> None:
    parts = [UBatchSlice(slice(0, 4), slice(0, 18)), UBatchSlice(slice(3, 5), slice(18, 64))]
    for found, expected in zip(
        split_attn_metadata(parts, on_gpu), split_attn_metadata(parts, HOST), strict=True
    ):
        same(found, expected)
        waiting("error")


def test_virtual_batches_do_not_wait(on_gpu: CommonAttentionMetadata) -> None:
    found, make_block_table = make_local_attention_virtual_batches(8, on_gpu, 2)
    other = make_block_table(on_gpu.block_table_tensor[:, :3] + 7)
    expected, make_expected = make_local_attention_virtual_batches(8, HOST, 2)
    same(found, expected)
    assert other.cpu().tolist() == make_expected(HOST.block_table_tensor[:, :3] + 7).tolist()


def test_fast_prefill_does_not_wait(on_gpu: CommonAttentionMetadata) -> None:
    found = make_kv_sharing_fast_prefill_common_attn_metadata(on_gpu)
    same(found, make_kv_sharing_fast_prefill_common_attn_metadata(HOST))


@pytest.mark.parametrize("blocks", [0, 2**27])
def test_slots_do_not_wait(on_gpu: CommonAttentionMetadata, blocks: int) -> None:
    lengths, new = on_gpu.seq_lens, on_gpu.query_start_loc.diff()
    arguments: Any = (on_gpu.block_table_tensor + blocks, lengths - new, new)
    out = torch.empty(80, dtype=torch.int64, device="cuda")
    found = compute_slot_mapping(*arguments, 64, num_tokens=70, out=out)
    waiting("default")
    expected = compute_slot_mapping(*(part.cpu() for part in arguments), 64, num_tokens=70)
    assert found.cpu().tolist() == expected.tolist()


def test_shares_shapes_and_programs_do_not_wait(on_gpu: CommonAttentionMetadata) -> None:
    shares = get_dcp_local_seq_lens(on_gpu.seq_lens, 4, None, 3)
    one = get_dcp_local_seq_lens(on_gpu.seq_lens, 4, 1, 3)
    shaped = reshape_query_for_spec_decode(torch.empty(64, 2, 4, device="cuda"), 16)
    _, batch_ptr, offset_ptr = compute_causal_conv1d_metadata(
        HOST.query_start_loc_cpu, device=torch.device("cuda")
    )
    waiting("default")
    assert shaped.shape == (16, 4, 2, 4)
    assert shares.cpu().tolist() == get_dcp_local_seq_lens(HOST.seq_lens, 4, None, 3).tolist()
    assert one.cpu().tolist() == shares[:, 1].cpu().tolist()
    _, expected, expected_offsets = compute_causal_conv1d_metadata(HOST.query_start_loc_cpu)
    assert torch.equal(batch_ptr.cpu(), expected)
    assert torch.equal(offset_ptr.cpu(), expected_offsets)
