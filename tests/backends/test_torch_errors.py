"""Misuse is refused: the error names the argument, what was found, and the limit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from attnplug.backends.torch_native import TorchBackend
from attnplug.core import BuilderConfig, FullAttentionSpec, LayerSpec
from attnplug.errors import BatchError, LayoutError, SpecError
from attnplug.testing import Batch, direct_batch, paged_batch

SPEC = LayerSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype="float32")


def attend(batch: Batch, **changes: Any) -> torch.Tensor:
    cache_spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype="float32")
    builder = TorchBackend.get_builder_cls()(cache_spec, ["x"], BuilderConfig(), torch.device("cpu"))
    impl = TorchBackend.get_impl_cls().from_spec(
        batch.spec, backend=TorchBackend, layer_name="x", tensors=batch.tensors
    )
    rows = batch.query.shape[0]
    arguments: dict[str, Any] = {
        "query": batch.query,
        "key": batch.key,
        "value": batch.value,
        "kv_cache": batch.kv_cache,
        "attn_metadata": builder.build(0, batch.common),
        "output": torch.empty(rows, batch.spec.num_heads, batch.spec.head_size_v),
    }
    return impl.forward(None, **{**arguments, **changes})


@pytest.fixture
def batch() -> Batch:
    return paged_batch(SPEC, [1, 20], [30, 20])


def test_an_lse_that_the_spec_did_not_declare_is_refused(batch: Batch) -> None:
    with pytest.raises(BatchError, match=r"output_lse.*needs_lse=True"):
        attend(batch, output_lse=torch.empty(21, 4))


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_an_output_scale_is_refused(batch: Batch, name: str) -> None:
    with pytest.raises(BatchError, match=name):
        attend(batch, **{name: torch.ones(1)})


def test_a_batch_cannot_widen_a_causal_layer(batch: Batch) -> None:
    batch.common.causal = False
    with pytest.raises(BatchError, match="cannot widen a causal layer"):
        attend(batch)


@pytest.mark.parametrize(
    ("name", "shape", "limit"),
    [
        ("query", (20, 4, 16), "at least 21, 4, 16"),
        ("query", (21, 2, 16), "at least 21, 4, 16"),
        ("query", (21, 64), "at least 21, 4, 16"),
        ("key", (21, 4, 16), "at least 21, 2, 16"),
        ("key", (20, 2, 16), "at least 21, 2, 16"),
        ("value", (21, 2, 8), "at least 21, 2, 16"),
        ("output", (21, 4, 8), "at least 21, 4, 16"),
    ],
)
def test_a_tensor_of_another_shape_is_refused(
    batch: Batch, name: str, shape: tuple[int, ...], limit: str
) -> None:
    with pytest.raises(BatchError, match=limit) as caught:
        attend(batch, **{name: torch.zeros(shape)})
    assert caught.value.field == name
    assert caught.value.value == shape


@pytest.mark.parametrize("name", ["query", "key", "value", "output"])
def test_a_tensor_of_another_dtype_is_refused(batch: Batch, name: str) -> None:
    tensor = torch.zeros(21, 2 if name in ("key", "value") else 4, 16, dtype=torch.float16)
    with pytest.raises(BatchError, match=r"must be torch\.float32") as caught:
        attend(batch, **{name: tensor})
    assert caught.value.field == f"{name}.dtype"


def test_an_lse_of_another_shape_or_dtype_is_refused() -> None:
    batch = paged_batch(SPEC.replace(needs_lse=True), [1, 20], [30, 20])
    with pytest.raises(BatchError, match="output_lse"):
        attend(batch, output_lse=torch.empty(4, 21))
    with pytest.raises(BatchError, match=r"output_lse\.dtype"):
        attend(batch, output_lse=torch.empty(21, 4, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(8, 2, 16, 4, 16), (8, 16, 2, 16), (8, 16, 2, 32), (2, 8, 16, 2, 16)])
def test_a_cache_of_another_shape_is_refused(batch: Batch, shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="num_blocks, 2, block_size, 2, 16"):
        attend(batch, kv_cache=torch.zeros(shape))


def test_a_cache_of_another_block_size_than_the_specs_is_refused() -> None:
    batch = paged_batch(SPEC.replace(block_size=16), [1], [30])
    with pytest.raises(LayoutError, match="num_blocks, 2, 16, 2, 16"):
        attend(batch, kv_cache=torch.zeros(8, 2, 32, 2, 16))


def test_a_cache_with_another_value_head_size_is_packed_k_first() -> None:
    batch = paged_batch(SPEC.replace(head_size_v=8), [1], [30])
    with pytest.raises(LayoutError, match="num_blocks, block_size, 2, 24"):
        attend(batch, kv_cache=torch.zeros(8, 2, 16, 2, 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8])
def test_a_cache_of_another_dtype_is_refused(batch: Batch, dtype: torch.dtype) -> None:
    assert batch.kv_cache is not None
    with pytest.raises(LayoutError, match=r"must be torch\.float32"):
        attend(batch, kv_cache=torch.zeros(batch.kv_cache.shape, dtype=dtype))


def test_a_decoder_without_its_cache_is_refused(batch: Batch) -> None:
    with pytest.raises(LayoutError, match="direct_kv=True"):
        attend(batch, kv_cache=None)


def test_direct_keys_and_a_cache_are_refused_together(batch: Batch) -> None:
    direct = direct_batch(SPEC.replace(direct_kv=True), [1], [30], key_lens=[30])
    with pytest.raises(LayoutError, match="must be None with direct_kv=True"):
        attend(direct, kv_cache=batch.kv_cache)


def test_direct_keys_are_required() -> None:
    direct = direct_batch(SPEC.replace(direct_kv=True), [1], [30], key_lens=[30])
    with pytest.raises(BatchError, match="key=None"):
        attend(direct, key=None)
    with pytest.raises(BatchError, match="value=None"):
        attend(direct, value=None)


def test_more_direct_keys_than_tokens_are_refused() -> None:
    direct = direct_batch(SPEC.replace(direct_kv=True), [1, 1], [30, 9], key_lens=[30, 10])
    with pytest.raises(BatchError, match="request 1 has more keys than its 9 tokens"):
        attend(direct)


def test_a_length_that_the_block_table_cannot_hold_is_refused(batch: Batch) -> None:
    batch.common.block_table_tensor = batch.common.block_table_tensor[:, :1]
    with pytest.raises(BatchError, match=r"seq_lens=30.*widen block_table_tensor"):
        attend(batch)


def test_sinks_that_the_spec_asks_for_must_be_given() -> None:
    with pytest.raises(SpecError, match="sinks"):
        TorchBackend.get_impl_cls().from_spec(
            SPEC.replace(has_sinks=True), backend=TorchBackend, layer_name="x"
        )


def test_a_storage_that_torch_does_not_know_is_refused(batch: Batch) -> None:
    odd = dataclasses.replace(batch, spec=SPEC.replace(kv_cache_dtype="int8"))
    with pytest.raises(LayoutError, match="kv_cache_dtype='int8'"):
        attend(odd)
