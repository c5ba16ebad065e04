"""The builder: host lengths, slots, and another group's table without a rebuild."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    BuilderConfig,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
)
from attnplug.errors import BatchError
from attnplug.testing import Batch, assert_close, paged_batch

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32")
CACHE = {"block_size": 16, "num_kv_heads": 2, "head_size": 16, "dtype": "float32"}


@pytest.fixture
def builder() -> AttentionMetadataBuilder:
    return TorchBackend.get_builder_cls()(
        FullAttentionSpec(**CACHE), ["x"], BuilderConfig(), torch.device("cpu")
    )


@pytest.fixture
def batch() -> Batch:
    return paged_batch(SPEC, [1, 20, 3], [33, 20, 9], padding=4)


def test_lengths_given_by_the_host_are_used(builder, batch: Batch) -> None:
    batch.common.seq_lens = torch.full((3,), 10**6)
    assert builder.build(0, batch.common).seq_lens.tolist() == [33, 20, 9]


@pytest.mark.parametrize("upper_bounds", [None, np.array([64, 64, 64], dtype=np.int32)])
def test_lengths_the_host_does_not_know_exactly_come_from_the_device(
    builder, batch: Batch, upper_bounds
) -> None:
    batch.common.seq_lens_host = upper_bounds
    batch.common.seq_lens_host_exact = False
    assert builder.build(0, batch.common).seq_lens.tolist() == [33, 20, 9]


def test_build_keeps_no_part_of_the_hosts_buffers(builder, batch: Batch) -> None:
    metadata = builder.build(0, batch.common)
    assert batch.common.seq_lens_host is not None
    batch.common.seq_lens_host[:] = 0
    batch.common.query_start_loc_cpu[:] = 0
    assert metadata.seq_lens.tolist() == [33, 20, 9]
    assert metadata.query_lens.tolist() == [1, 20, 3]


def test_slots_past_the_batch_are_cut_but_not_those_of_an_encoder(builder, batch: Batch) -> None:
    assert builder.build(0, batch.common).slot_mapping.shape == (24,)
    cross = type(builder)(CrossAttentionSpec(**CACHE), ["x"], BuilderConfig(), torch.device("cpu"))
    assert cross.build(0, batch.common).slot_mapping.shape == (28,)


def test_requests_past_num_reqs_are_not_looked_at(builder, batch: Batch) -> None:
    padded = dataclasses.replace(
        batch.common,
        query_start_loc_cpu=torch.tensor([0, 1, 21, 24, -5, -9]),
        seq_lens_host=np.array([33, 20, 9, -1, -1], dtype=np.int32),
    )
    assert builder.build(0, padded).seq_lens.tolist() == [33, 20, 9]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("query_start_loc_cpu", torch.tensor([0, 5, 4, 24])),
        ("query_start_loc_cpu", torch.tensor([-1, 1, 21, 24])),
        ("query_start_loc_cpu", torch.tensor([0, 24])),
        ("query_start_loc_cpu", torch.tensor([0, 1, 21, 25])),
        ("key_start_loc_cpu", torch.tensor([0, 9, 3, 4])),
        ("seq_lens_host", np.array([33, -20, 9])),
        ("seq_lens_host", np.array([33, 20])),
    ],
)
def test_batches_that_mean_nothing_are_refused(builder, batch: Batch, field: str, value) -> None:
    with pytest.raises(BatchError, match=field.removesuffix("_host")):
        builder.build(0, dataclasses.replace(batch.common, **{field: value}))


def test_another_groups_table_needs_no_rebuild(builder, batch: Batch) -> None:
    assert batch.kv_cache is not None
    impl = TorchBackend.get_impl_cls().from_spec(SPEC, backend=TorchBackend, layer_name="x")
    first = builder.build(0, batch.common)
    impl.forward(None, batch.query, batch.key, batch.value, batch.kv_cache, first)

    order = torch.randperm(batch.kv_cache.shape[0] - 1, generator=torch.Generator().manual_seed(1)) + 1
    moved = torch.full_like(batch.kv_cache, torch.nan)
    moved[order] = batch.kv_cache[1:]
    slots = batch.common.slot_mapping[:24]
    table = batch.common.block_table_tensor.clone()
    real = (table > 0) & (table < batch.kv_cache.shape[0])
    table[real] = order[table[real].long() - 1].int()
    second = builder.update_block_table(first, table, order[slots // 16 - 1] * 16 + slots % 16)
    found = impl.forward(None, batch.query, batch.key, batch.value, moved, second)
    assert_close(found[:24], batch.oracle().output, 1e-5)
    assert first.block_table.data_ptr() == batch.common.block_table_tensor.data_ptr()


def test_batches_need_no_order_and_no_host_lengths(builder) -> None:
    assert builder.reorder_batch_threshold is None
    assert builder.needs_host_seq_lens == "none"
    assert builder.supports_update_block_table
    assert builder.get_cudagraph_support(builder.config, builder.kv_cache_spec) is AttentionCGSupport.NEVER


def test_drafting_and_capture_build_the_same(builder, batch: Batch) -> None:
    expected = builder.build(0, batch.common)
    for metadata in (
        builder.build_for_drafting(batch.common, 1),
        builder.build_for_cudagraph_capture(batch.common),
    ):
        assert np.array_equal(metadata.query_starts, expected.query_starts)
        assert np.array_equal(metadata.seq_lens, expected.seq_lens)


def test_one_metadata_serves_layers_that_attend_long_decodes_in_different_ways() -> None:
    plain = LayerSpec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float32")
    batch = paged_batch(plain, [1, 1], [20, 400])
    builder = TorchBackend.get_builder_cls()(
        FullAttentionSpec(**{**CACHE, "head_size": 64}), ["x", "y"], BuilderConfig(), torch.device("cpu")
    )
    metadata = builder.build(0, batch.common)
    for spec in (plain, plain.replace(logits_soft_cap=3.0), plain):
        impl = TorchBackend.get_impl_cls().from_spec(spec, backend=TorchBackend, layer_name="x")
        output = torch.full_like(batch.query, torch.nan)
        impl.forward(None, batch.query, batch.key, batch.value, batch.kv_cache, metadata, output)
        assert_close(output, batch.oracle(spec).output, 1e-5)
