"""Layers that share KV run only the tokens whose logits are wanted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from batch_strategies import Lengths, common_of, lengths, on_meta, unmodified
from hypothesis import given
from hypothesis import strategies as st
from paged_keys import PagedKeys

from attnplug.backends.torch_native.backend import TorchBackend
from attnplug.core import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    BuilderConfig,
    CommonAttentionMetadata,
    FullAttentionSpec,
)
from attnplug.core.batch import (
    KVSharingFastPrefillMetadata,
    create_fast_prefill_custom_backend,
    make_kv_sharing_fast_prefill_common_attn_metadata,
    subclass_attention_metadata,
)
from attnplug.core.errors import BatchError


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenMetadata(AttentionMetadata):
    """As a backend would write it that wants no surprises."""

    slot_mapping: torch.Tensor
    num_tokens: int
    doubled: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * self.num_tokens)


class PlainMetadata(AttentionMetadata):
    """As a backend would write it that wants no dataclass."""

    def __init__(self, slot_mapping: torch.Tensor, num_tokens: int) -> None:
        self.slot_mapping = slot_mapping
        self.num_tokens = num_tokens


class Builder(AttentionMetadataBuilder[Any]):
    """Notes the tokens it was asked for."""

    makes: type[Any] = FrozenMetadata

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        return self.makes(common_attn_metadata.slot_mapping, common_attn_metadata.num_actual_tokens)


class PlainBuilder(Builder):
    makes = PlainMetadata


class Sharing(AttentionBackend):
    """A backend that only builds."""

    builder_cls = Builder

    @staticmethod
    def get_name() -> str:
        return "SHARING"

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl[Any]]:
        raise NotImplementedError

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder[Any]]:
        return cls.builder_cls


class PlainSharing(Sharing):
    builder_cls = PlainBuilder


def builder_of(backend: type[AttentionBackend]) -> Any:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype="float32")
    return backend.get_builder_cls()(spec, ["layer"], BuilderConfig(), torch.device("cpu"))


def wanting(common: CommonAttentionMetadata, indices: list[int], padding: int = 0) -> CommonAttentionMetadata:
    padded = torch.tensor(indices + (indices[-1:] or [0]) * padding, dtype=torch.int32)
    return dataclasses.replace(common, logits_indices_padded=padded, num_logits_indices=len(indices))


@given(st.data(), lengths(most_query=6), st.integers(0, 4))
def test_fast_prefill_equals_the_rows_it_selects(data: st.DataObject, drawn: Lengths, padding: int) -> None:
    keys = PagedKeys.of(*drawn, 4)
    starts = keys.common.query_start_loc_cpu.tolist()
    counts = [data.draw(st.integers(0, query)) for query in drawn[0]]
    rows = [row for stop, count in zip(starts[1:], counts, strict=True) for row in range(stop - count, stop)]
    common = wanting(keys.common, rows, padding)
    with unmodified(common):
        batch = make_kv_sharing_fast_prefill_common_attn_metadata(common)
    if batch is common:
        assert max(drawn[0]) <= 1
        return
    assert batch.query_start_loc_cpu.diff().tolist() == counts
    assert torch.equal(batch.query_start_loc, batch.query_start_loc_cpu)
    assert (batch.num_actual_tokens, batch.max_query_len) == (len(rows), max(counts))
    assert torch.equal(batch.seq_lens, common.seq_lens)
    expected = keys.attend()[rows]
    torch.testing.assert_close(keys.attend(batch, keys.query[rows]), expected, rtol=0, atol=1e-12)


def test_single_token_requests_are_returned_as_they_are() -> None:
    common = common_of([1] * 1024, [9] * 1024)
    assert make_kv_sharing_fast_prefill_common_attn_metadata(common) is common


def test_a_request_may_want_nothing_and_the_order_does_not_matter() -> None:
    batch = make_kv_sharing_fast_prefill_common_attn_metadata(wanting(common_of([3, 2, 4]), [8, 2, 7]))
    assert batch.query_start_loc.tolist() == [0, 1, 1, 3]
    assert batch.query_start_loc.dtype == torch.int32
    assert [type(count) for count in (batch.num_actual_tokens, batch.max_query_len)] == [int, int]


def test_indices_on_a_device_need_a_copy_on_the_host() -> None:
    absent = on_meta(wanting(common_of([3, 2]), [2, 4], padding=3))
    with pytest.raises(BatchError, match=r"logits_indices_padded='meta' must be on the host"):
        make_kv_sharing_fast_prefill_common_attn_metadata(absent)
    absent.logits_indices_cpu = torch.tensor([2, 4])  # type: ignore[attr-defined]
    batch = make_kv_sharing_fast_prefill_common_attn_metadata(absent)
    assert batch.query_start_loc.device.type == "meta"
    assert batch.query_start_loc_cpu.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "logits_indices_padded=None is required where requests have more than one token"),
        ({"logits_indices_padded": torch.tensor([1])}, "num_logits_indices=None is required"),
        (
            {"logits_indices_padded": torch.tensor([1]), "num_logits_indices": 2},
            "num_logits_indices=2 must be in 0 .. 1",
        ),
        (
            {"logits_indices_padded": torch.tensor([-1, 4]), "num_logits_indices": 2},
            r"logits_indices_padded=\(-1, 4\) must be in 0 .. 4, the batch's tokens",
        ),
        (
            {"logits_indices_padded": torch.tensor([1, 5]), "num_logits_indices": 2},
            r"logits_indices_padded=\(1, 5\) must be in 0 .. 4",
        ),
    ],
)
def test_indices_that_mean_nothing_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        make_kv_sharing_fast_prefill_common_attn_metadata(common_of([3, 2], **changes))


@pytest.mark.parametrize("backend", [Sharing, PlainSharing, TorchBackend])
def test_the_custom_backend_builds_for_wanted_tokens_and_says_which(backend: type[AttentionBackend]) -> None:
    made = create_fast_prefill_custom_backend("FastPrefill", backend)
    assert made.__name__ == "FastPrefill" + backend.__name__
    assert issubclass(made, backend)
    builder = builder_of(made)
    assert isinstance(builder, backend.get_builder_cls())
    common = wanting(common_of([3, 2], [7, 9]), [2, 4])
    metadata = builder.build(0, common)
    assert isinstance(metadata, KVSharingFastPrefillMetadata)
    assert metadata.logits_indices_padded is common.logits_indices_padded
    assert metadata.num_logits_indices == 2
    assert type(metadata) is type(builder.build(0, common)), "one class, not one per step"
    own = builder_of(backend).build(0, make_kv_sharing_fast_prefill_common_attn_metadata(common))
    assert isinstance(metadata, type(own))
    assert not isinstance(own, KVSharingFastPrefillMetadata)


def test_computed_fields_come_along_and_a_replaced_copy_keeps_the_indices() -> None:
    builder = builder_of(create_fast_prefill_custom_backend("FastPrefill", Sharing))
    metadata = builder.build_for_drafting(wanting(common_of([3, 2], [7, 9]), [2, 4]), 0)
    assert (metadata.num_tokens, metadata.doubled) == (2, 4)
    assert dataclasses.replace(metadata, num_tokens=3).num_logits_indices == 2


def test_a_metadata_subclass_has_its_fields_and_its_name() -> None:
    made: Any = subclass_attention_metadata("Extra", FrozenMetadata, [("rank", int, 0), ("name", str, "x")])
    assert made.__name__ == "ExtraFrozenMetadata"
    metadata = made(torch.empty(0), 3, rank=1)
    assert (metadata.num_tokens, metadata.rank, metadata.name) == (3, 1, "x")
    assert isinstance(metadata, FrozenMetadata)
    with pytest.raises(dataclasses.FrozenInstanceError):
        metadata.rank = 2
    plain: Any = subclass_attention_metadata("Extra", AttentionMetadata, [("slot_mapping", torch.Tensor)])
    metadata = plain(slot_mapping=torch.empty(3))
    metadata.slot_mapping = torch.empty(2)
    assert isinstance(metadata, AttentionMetadata)


def test_a_backend_without_wanted_rows_builds_all_tokens() -> None:
    builder = builder_of(create_fast_prefill_custom_backend("FastPrefill", Sharing))
    metadata = builder.build(0, common_of([3, 2], [4, 2]))
    assert (metadata.num_tokens, metadata.num_logits_indices) == (5, None)


def test_a_backend_builds_the_wanted_rows_of_single_tokens_too() -> None:
    builder = builder_of(create_fast_prefill_custom_backend("FastPrefill", Sharing))
    assert builder.build(0, wanting(common_of([1, 1, 1], [4, 2, 9]), [0, 2])).num_tokens == 2
    every = wanting(common_of([1, 1], [4, 2]), [0, 1])
    assert builder.build(0, every).num_tokens == 2
