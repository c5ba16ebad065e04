"""K and V that come with the call: encoders, engines with their own cache, cross attention."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import BuilderConfig, CrossAttentionSpec, LayerSpec
from attnplug.testing import (
    Batch,
    assert_close,
    assert_lse_close,
    direct_batch,
    paged_batch,
    run_batch,
    tolerance,
)

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_size": 16, "dtype": "float32"}


def check(batch: Batch) -> None:
    found, lse = run_batch(TorchBackend, batch)
    expected, bound = batch.oracle(), tolerance(batch.spec)
    tokens = batch.common.num_actual_tokens
    assert_close(found[:tokens], expected.output, bound.output)
    assert found[tokens:].isnan().all()
    if lse is not None:
        assert_lse_close(lse[:tokens], expected.lse, bound.lse)


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
@pytest.mark.parametrize("direct_kv", [False, True])
@pytest.mark.parametrize(
    "features", [{}, {"window": (4, 7)}, {"has_alibi": True}, {"head_size_v": 24}], ids=str
)
def test_encoders_attend_both_sides(attn_type: str, direct_kv: bool, features: dict[str, object]) -> None:
    spec = LayerSpec(**SIZES, attn_type=attn_type, direct_kv=direct_kv, **features)
    check(direct_batch(spec, [1, 9, 40, 0, 90], [1, 9, 40, 0, 90], padding=3))


@pytest.mark.parametrize("needs_lse", [False, True])
@pytest.mark.parametrize(
    "features", [{}, {"sliding_window": 6}, {"chunk_size": 8}, {"has_sinks": True}], ids=str
)
def test_the_last_keys_of_each_request_stand_at_its_end(features: dict[str, object], needs_lse: bool) -> None:
    spec = LayerSpec(**SIZES, direct_kv=True, needs_lse=needs_lse, **features)
    batch = direct_batch(
        spec, [1, 4, 30, 1, 20], [90, 40, 64, 3, 20], key_lens=[12, 40, 50, 3, 20], padding=2
    )
    check(batch)


def test_alibi_measures_from_true_positions_when_keys_were_dropped() -> None:
    spec = LayerSpec(**SIZES, direct_kv=True, has_alibi=True, sliding_window=6)
    check(direct_batch(spec, [1, 20], [90, 64], key_lens=[6, 25]))


def test_keys_and_values_may_have_different_strides() -> None:
    spec = LayerSpec(**SIZES, direct_kv=True)
    batch = direct_batch(spec, [1, 3, 20], [9, 12, 64], key_lens=[9, 12, 50])
    wide = torch.randn(batch.value.shape[0], 7, 16)
    wide[:, 2:4] = batch.value
    heads_first = batch.key.transpose(0, 1).contiguous().transpose(0, 1)
    check(dataclasses.replace(batch, key=heads_first, value=wide[:, 2:4]))


def test_key_start_locations_are_read_from_the_device_where_the_host_has_none() -> None:
    batch = direct_batch(LayerSpec(**SIZES, direct_kv=True), [1, 20], [9, 64], key_lens=[9, 50])
    batch.common.key_start_loc_cpu = None
    check(batch)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("features", [{}, {"has_sinks": True}, {"window": (3, 2)}], ids=str)
def test_cross_attention_reads_the_encoders_tokens(block_size: int, features: dict[str, object]) -> None:
    spec = LayerSpec(**SIZES, attn_type="encoder_decoder", needs_lse=True, **features)
    check(paged_batch(spec, [5, 1, 30, 2, 20], [20, 7, 12, 0, 20], block_size=block_size, padding=1))


def test_later_steps_of_cross_attention_come_without_keys() -> None:
    spec = LayerSpec(**SIZES, attn_type="encoder_decoder")
    batch = paged_batch(spec, [1, 20], [20, 7])
    expected, _ = run_batch(TorchBackend, batch)
    cache_spec = CrossAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype="float32")
    builder = TorchBackend.get_builder_cls()(cache_spec, ["x"], BuilderConfig(), torch.device("cpu"))
    impl = TorchBackend.get_impl_cls().from_spec(spec, backend=TorchBackend, layer_name="x")
    metadata = builder.build(0, batch.common)
    found = impl.forward(None, batch.query, None, None, batch.kv_cache, metadata)
    assert torch.equal(found, expected)
