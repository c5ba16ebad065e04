"""Any batch: every mix of requests, page size, layout and stride; nothing else is read or written."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import BuilderConfig, FullAttentionSpec, LayerSpec
from attnplug.testing import Batch, assert_close, assert_lse_close, paged_batch, run_batch, tolerance

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32")

BATCHES = {
    "decode": ([1] * 6, [1, 5, 16, 17, 33, 100]),
    "one decode": ([1], [40]),
    "prefill": ([1, 16, 33, 64], [1, 16, 33, 64]),
    "one prefill": ([50], [50]),
    "extend": ([30, 20, 17], [31, 64, 90]),
    "speculative": ([4, 4, 4], [4, 30, 61]),
    "ragged speculative": ([1, 4, 2, 3], [20, 30, 2, 61]),
    "unordered": ([40, 1, 3, 20, 1, 17], [40, 30, 3, 55, 1, 80]),
    "no new tokens": ([0, 1, 0, 20, 0], [12, 7, 0, 20, 1]),
    "only idle": ([0, 0], [4, 5]),
    "empty": ([], []),
}


def check(batch: Batch) -> None:
    found, lse = run_batch(TorchBackend, batch)
    expected, bound = batch.oracle(), tolerance(batch.spec)
    tokens = batch.common.num_actual_tokens
    assert_close(found[:tokens], expected.output, bound.output)
    assert found[tokens:].isnan().all()
    if lse is not None:
        assert_lse_close(lse[:tokens], expected.lse, bound.lse)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("needs_lse", [False, True])
@pytest.mark.parametrize("name", BATCHES)
def test_every_mix_of_requests_is_served(name: str, needs_lse: bool, padding: int) -> None:
    check(paged_batch(SPEC.replace(needs_lse=needs_lse), *BATCHES[name], padding=padding))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [1, 7, 16, 128])
@pytest.mark.parametrize("head_size_v", [16, 12])
def test_any_page_size_and_layout_is_read(layout: str, block_size: int, head_size_v: int) -> None:
    spec = SPEC.replace(head_size_v=head_size_v)
    check(paged_batch(spec, [1, 3, 20, 40], [70, 9, 20, 61], block_size=block_size, layout=layout))


@pytest.mark.parametrize(("size", "size_v"), [(1, 1), (7, 7), (80, 80), (256, 256), (96, 64), (64, 129)])
def test_any_head_size_is_served(size: int, size_v: int) -> None:
    spec = SPEC.replace(head_size=size, head_size_v=size_v)
    check(paged_batch(spec, [1, 3, 20], [40, 9, 31]))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (5, 1), (6, 3), (8, 8)])
def test_any_grouping_of_heads_is_served(heads: int, kv_heads: int) -> None:
    spec = SPEC.replace(num_heads=heads, num_kv_heads=kv_heads, needs_lse=True, has_sinks=True)
    check(paged_batch(spec, [1, 3, 20], [40, 9, 31]))


def test_requests_longer_than_a_tile_are_gathered_in_pieces() -> None:
    spec = SPEC.replace(num_heads=8, num_kv_heads=8, head_size=256)
    check(paged_batch(spec, [1, 2, 1], [2100, 1025, 20]))
    check(paged_batch(spec.replace(kv_cache_dtype="bfloat16", has_alibi=True), [1, 2, 1], [2100, 1025, 20]))


def test_a_cache_that_is_a_layer_of_a_larger_tensor_is_used_in_place() -> None:
    batch = paged_batch(SPEC, [1, 20], [33, 20])
    assert batch.kv_cache is not None
    layers = torch.full((len(batch.kv_cache), 3, *batch.kv_cache.shape[1:]), torch.nan)
    layers[:, 1] = batch.kv_cache
    check(dataclasses.replace(batch, kv_cache=layers[:, 1]))
    assert layers[:, 0].isnan().all()
    assert layers[:, 2].isnan().all()


def test_only_the_slots_of_the_batch_are_written() -> None:
    batch = paged_batch(SPEC, [1, 20, 3], [33, 20, 9], padding=2)
    assert batch.kv_cache is not None
    before = batch.kv_cache.clone()
    run_batch(TorchBackend, batch)
    k, v = TorchBackend.split_kv(batch.kv_cache, SPEC)
    slots = batch.common.slot_mapping[:24]
    assert torch.equal(k[slots // 16, slots % 16], batch.key[:24])
    assert torch.equal(v[slots // 16, slots % 16], batch.value[:24])
    for pages in (*TorchBackend.split_kv(before, SPEC), k, v):
        pages[slots // 16, slots % 16] = 0
    assert torch.equal(before.nan_to_num(7.0), batch.kv_cache.nan_to_num(7.0))


def test_negative_slots_are_not_written() -> None:
    batch = paged_batch(SPEC, [6], [6])
    assert batch.kv_cache is not None
    batch.common.slot_mapping[2:4] = -1
    before = batch.kv_cache.clone()
    impl = TorchBackend.get_impl_cls().from_spec(SPEC, backend=TorchBackend, layer_name="layer")
    impl.update_kv_cache(None, batch.key, batch.value, batch.kv_cache, batch.common.slot_mapping)
    changed = (batch.kv_cache.nan_to_num(7.0) != before.nan_to_num(7.0)).any(-1).any(-1)
    assert int(changed.sum()) == 2 * 4


def test_inputs_are_not_modified_and_outputs_repeat() -> None:
    batch = paged_batch(SPEC.replace(has_sinks=True, has_alibi=True), [1, 20, 3], [33, 20, 9], padding=1)
    common = batch.common
    inputs = [batch.query, batch.key, batch.value, batch.tensors.sinks, batch.tensors.alibi_slopes]
    inputs += [common.query_start_loc, common.seq_lens, common.block_table_tensor, common.slot_mapping]
    before = [tensor.clone() for tensor in inputs if tensor is not None]
    first, _ = run_batch(TorchBackend, batch)
    second, _ = run_batch(TorchBackend, batch)
    assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))
    after = [tensor for tensor in inputs if tensor is not None]
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, after, strict=True))
    assert common.seq_lens_host is not None
    assert np.array_equal(common.seq_lens_host, [33, 20, 9])


def test_views_of_a_packed_projection_are_taken_as_they_are() -> None:
    batch = paged_batch(SPEC, [1, 20, 3], [33, 20, 9])
    packed = torch.cat([batch.query, batch.key, batch.value], dim=1)
    query, key, value = packed.split([4, 2, 2], dim=1)
    check(dataclasses.replace(batch, query=query, key=key, value=value))


def test_a_layer_that_shares_kv_writes_none_and_reads_only_pages() -> None:
    batch = paged_batch(SPEC, [1, 20, 40], [33, 20, 40])
    run_batch(TorchBackend, batch)
    impl = TorchBackend.get_impl_cls().from_spec(
        SPEC, backend=TorchBackend, layer_name="later", kv_sharing_target_layer_name="layer"
    )
    cache_spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype="float32")
    builder = TorchBackend.get_builder_cls()(cache_spec, ["later"], BuilderConfig(), torch.device("cpu"))
    junk = torch.full_like(batch.key, torch.nan)
    found = impl.forward(None, batch.query, junk, junk, batch.kv_cache, builder.build(0, batch.common))
    assert_close(found, batch.oracle().output, 1e-5)


def test_layers_of_one_step_share_the_metadata_but_not_their_windows_or_layouts() -> None:
    lens = [1, 3, 20], [70, 33, 61]
    full = paged_batch(SPEC, *lens)
    cache_spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype="float32")
    builder = TorchBackend.get_builder_cls()(cache_spec, ["x"], BuilderConfig(), torch.device("cpu"))
    metadata = builder.build(0, full.common)
    for changes in ({}, {"sliding_window": 5}, {"sliding_window": 9}, {"chunk_size": 16}):
        for layout in ("NHD", "HND"):
            batch = paged_batch(SPEC.replace(**changes), *lens, layout=layout)
            assert torch.equal(batch.common.slot_mapping, full.common.slot_mapping)
            impl = TorchBackend.get_impl_cls().from_spec(batch.spec, backend=TorchBackend, layer_name=layout)
            found = impl.forward(None, batch.query, batch.key, batch.value, batch.kv_cache, metadata)
            assert_close(found, batch.oracle().output, 1e-5)


WIDE = LayerSpec(num_heads=8, num_kv_heads=4, head_size=64, dtype="float32")
"""So wide that TORCH attends the decodes of 64 tokens and more page by page, those past 2,048 in pieces."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block_size", [5, 16, 64])
@pytest.mark.parametrize(
    "changes",
    [{}, {"sliding_window": 100}, {"chunk_size": 96}, {"num_kv_heads": 8}, {"num_heads": 12}, {"scale": 0.3}],
    ids=str,
)
def test_long_decodes_among_others_see_their_own_keys_only(
    changes: dict[str, int], block_size: int, dtype: str
) -> None:
    spec = WIDE.replace(dtype=dtype, **changes)
    lengths = [1, 20, 1, 1, 0, 3, 1, 1], [300, 60, 12, 131, 400, 200, 257, 160]
    check(paged_batch(spec, *lengths, block_size=block_size, padding=3, drop_window=True))


def test_decodes_too_long_for_the_cache_are_gathered_in_pieces() -> None:
    check(paged_batch(WIDE, [1, 1, 1], [2048, 2049, 2500]))


def test_long_decodes_share_their_plan_among_the_layers_of_a_step() -> None:
    batch = paged_batch(WIDE, [1, 1], [300, 200])
    builder = TorchBackend.get_builder_cls()(
        FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype="float32"),
        ["a", "b"],
        BuilderConfig(),
        torch.device("cpu"),
    )
    metadata = builder.build(0, batch.common)
    expected = batch.oracle().output
    for _ in range(2):
        impl = TorchBackend.get_impl_cls().from_spec(
            batch.spec, backend=TorchBackend, layer_name="a", tensors=batch.tensors
        )
        output = torch.full_like(batch.query, torch.nan)
        impl.forward(None, batch.query, batch.key, batch.value, batch.kv_cache, metadata, output)
        assert_close(output, expected, tolerance(batch.spec).output)
    assert len(metadata.plans) == 1
