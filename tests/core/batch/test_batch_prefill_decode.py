"""What a decoder, an encoder and a cross layer are told of one step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from attnplug.core import AttentionType
from attnplug.core.batch import (
    get_num_prefill_decode_query_kv_tokens,
    get_seq_len_block_table_args,
    is_all_cross_attn_metadata_set,
    is_all_encoder_attn_metadata_set,
)
from attnplug.core.errors import BatchError

ENCODER_FIELDS = ("encoder_seq_lens", "encoder_seq_lens_tensor", "max_encoder_seq_len")
CROSS_FIELDS = ("cross_slot_mapping", "cross_block_tables")


def metadata(**changes: Any) -> Any:
    """A step; its tensors are names, for nothing looks into them."""
    fields: dict[str, Any] = {
        "num_prefill_tokens": 7,
        "num_decode_tokens": 3,
        "num_encoder_tokens": 11,
        "seq_lens_tensor": "lengths",
        "max_prefill_seq_len": 20,
        "max_decode_seq_len": 30,
        "block_tables": "table",
        "encoder_seq_lens": [5, 6],
        "encoder_seq_lens_tensor": "encoder lengths",
        "max_encoder_seq_len": 6,
        "cross_slot_mapping": "cross slots",
        "cross_block_tables": "cross table",
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize(
    ("attn_type", "expected"),
    [
        (AttentionType.DECODER, (7, 7, 3)),
        ("decoder", (7, 7, 3)),
        (AttentionType.ENCODER_ONLY, (7, 7, 3)),
        (AttentionType.ENCODER, (11, 11, 0)),
        (AttentionType.ENCODER_DECODER, (7, 11, 3)),
    ],
)
def test_how_many_queries_and_keys_each_layer_has(attn_type: str, expected: tuple[int, int, int]) -> None:
    assert get_num_prefill_decode_query_kv_tokens(metadata(), attn_type) == expected


@pytest.mark.parametrize("attn_type", [AttentionType.ENCODER, AttentionType.ENCODER_DECODER])
def test_an_encoder_s_tokens_must_be_counted_where_they_are_attended(attn_type: AttentionType) -> None:
    absent = metadata(num_encoder_tokens=None)
    with pytest.raises(BatchError, match=f"num_encoder_tokens=None is required for attn_type {attn_type}"):
        get_num_prefill_decode_query_kv_tokens(absent, attn_type)
    assert get_num_prefill_decode_query_kv_tokens(absent, AttentionType.DECODER) == (7, 7, 3)


@pytest.mark.parametrize(
    ("attn_type", "is_prompt", "expected"),
    [
        (AttentionType.DECODER, True, ("lengths", 20, "table")),
        (AttentionType.DECODER, False, ("lengths", 30, "table")),
        (AttentionType.ENCODER_DECODER, True, ("encoder lengths", 6, "cross table")),
        ("encoder_decoder", False, ("encoder lengths", 6, "cross table")),
        (AttentionType.ENCODER, True, ("encoder lengths", 6, None)),
    ],
)
def test_whose_lengths_and_pages_each_layer_reads(
    attn_type: str, is_prompt: bool, expected: tuple[Any, ...]
) -> None:
    assert get_seq_len_block_table_args(metadata(), is_prompt, attn_type) == expected


@pytest.mark.parametrize("attn_type", ["encoder_only", "sideways"])
def test_other_types_have_no_such_lengths(attn_type: str) -> None:
    with pytest.raises(BatchError, match=f"attn_type='{attn_type}' must be"):
        get_seq_len_block_table_args(metadata(), True, attn_type)


def test_an_unknown_type_has_no_counts() -> None:
    with pytest.raises(
        BatchError, match="attn_type='sideways' must be one of decoder, encoder, encoder_only"
    ):
        get_num_prefill_decode_query_kv_tokens(metadata(), "sideways")


@pytest.mark.parametrize("field", ["encoder_seq_lens_tensor", "max_encoder_seq_len"])
@pytest.mark.parametrize("attn_type", ["encoder", "encoder_decoder"])
def test_an_encoder_s_lengths_must_be_there_where_they_are_read(field: str, attn_type: str) -> None:
    with pytest.raises(BatchError, match=f"{field}=None is required for attn_type {attn_type}"):
        get_seq_len_block_table_args(metadata(**{field: None}), True, attn_type)


def test_all_is_set_when_nothing_is_missing() -> None:
    assert is_all_encoder_attn_metadata_set(metadata())
    assert is_all_cross_attn_metadata_set(metadata())


@pytest.mark.parametrize("field", ENCODER_FIELDS)
def test_encoder_and_cross_layers_miss_an_encoder_field(field: str) -> None:
    assert not is_all_encoder_attn_metadata_set(metadata(**{field: None}))
    assert not is_all_cross_attn_metadata_set(metadata(**{field: None}))


@pytest.mark.parametrize("field", CROSS_FIELDS)
def test_only_cross_layers_miss_a_cross_field(field: str) -> None:
    assert is_all_encoder_attn_metadata_set(metadata(**{field: None}))
    assert not is_all_cross_attn_metadata_set(metadata(**{field: None}))
