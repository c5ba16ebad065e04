"""Batch functions against recorded inputs and outputs; every case of every file is a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attnplug.core import CommonAttentionMetadata
from attnplug.core import batch as functions
from attnplug.core.errors import BatchError

HERE = Path(__file__).parent
Case = dict[str, Any]


def common_of(case: Case) -> CommonAttentionMetadata:
    """The batch that a case describes."""
    query_lens, seq_lens = case["query_lens"], case["seq_lens"]
    starts = torch.from_numpy(np.cumsum([0, *query_lens]).astype(np.int32))
    indices = case.get("logits_indices_padded")
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        num_reqs=len(query_lens),
        num_actual_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.tensor(case.get("block_table", [[0]] * len(query_lens)), dtype=torch.int32),
        slot_mapping=torch.arange(sum(query_lens)),
        logits_indices_padded=None if indices is None else torch.tensor(indices, dtype=torch.int32),
        num_logits_indices=case.get("num_logits_indices"),
    )


def described(common: CommonAttentionMetadata) -> dict[str, Any]:
    """A batch in the words of the expected values."""
    assert torch.equal(common.query_start_loc, common.query_start_loc_cpu)
    return {
        "query_start_loc": common.query_start_loc.tolist(),
        "seq_lens": common.seq_lens.tolist(),
        "num_reqs": common.num_reqs,
        "num_actual_tokens": common.num_actual_tokens,
        "max_query_len": common.max_query_len,
        "max_seq_len": common.max_seq_len,
        "block_table": common.block_table_tensor.tolist(),
        "slot_mapping": common.slot_mapping.tolist(),
        "num_computed_tokens": common.compute_num_computed_tokens().tolist(),
    }


def split_decodes_and_prefills(case: Case) -> Any:
    return functions.split_decodes_and_prefills(
        common_of(case), decode_threshold=case["decode_threshold"], require_uniform=case["require_uniform"]
    )


def split_decodes_prefills_and_extends(case: Case) -> Any:
    return functions.split_decodes_prefills_and_extends(
        common_of(case), decode_threshold=case["decode_threshold"]
    )


def split_prefill_chunks(case: Case) -> Any:
    lengths = torch.tensor(case["seq_lens"], dtype=torch.int32)
    return functions.split_prefill_chunks(lengths, case["workspace_size"], case["request_offset"])


def split_attn_metadata(case: Case) -> Any:
    slices = [functions.UBatchSlice(slice(*reqs), slice(*tokens)) for reqs, tokens in case["slices"]]
    return [described(part) for part in functions.split_attn_metadata(slices, common_of(case))]


def make_local_attention_virtual_batches(case: Case) -> Any:
    batch, make_block_table = functions.make_local_attention_virtual_batches(
        case["attn_chunk_size"], common_of(case), case["block_size"]
    )
    other = make_block_table(torch.tensor(case["other_block_table"], dtype=torch.int32))
    return {**described(batch), "make_block_table_of_other": other.tolist()}


def make_kv_sharing_fast_prefill_common_attn_metadata(case: Case) -> Any:
    return described(functions.make_kv_sharing_fast_prefill_common_attn_metadata(common_of(case)))


def get_dcp_local_seq_lens(case: Case) -> Any:
    lengths = torch.tensor(case["seq_lens"], dtype=torch.int32)
    options = {name: value for name, value in case.items() if name != "seq_lens"}
    shares = functions.get_dcp_local_seq_lens(lengths, **options)
    assert shares.dtype == torch.int32
    return shares.tolist()


def compute_causal_conv1d_metadata(case: Case) -> Any:
    starts = torch.from_numpy(np.cumsum([0, *case["query_lens"]]).astype(np.int32))
    nums_dict, batch_ptr, offset_ptr = functions.compute_causal_conv1d_metadata(starts)
    of_eight = nums_dict[8]
    total = of_eight["tot"]
    assert of_eight["batch_ptr"] is batch_ptr
    assert of_eight["token_chunk_offset_ptr"] is offset_ptr
    assert batch_ptr.dtype == offset_ptr.dtype == torch.int32
    assert (batch_ptr[total:] == -1).all()
    assert (offset_ptr[total:] == -1).all()
    return {
        "nums": of_eight["nums"].tolist(),
        "tot": total,
        "mlist": of_eight["mlist"].tolist(),
        "offsetlist": of_eight["offsetlist"].tolist(),
        "mlist_len": of_eight["mlist_len"],
        "buffer_len": len(batch_ptr),
        "batch_ptr": batch_ptr[:total].tolist(),
        "token_chunk_offset_ptr": offset_ptr[:total].tolist(),
    }


CALLS: dict[str, Callable[[Case], Any]] = {
    call.__name__: call
    for call in (
        split_decodes_and_prefills,
        split_decodes_prefills_and_extends,
        split_prefill_chunks,
        split_attn_metadata,
        make_local_attention_virtual_batches,
        make_kv_sharing_fast_prefill_common_attn_metadata,
        get_dcp_local_seq_lens,
        compute_causal_conv1d_metadata,
    )
}
CASES = [
    pytest.param(path.stem, case, id=f"{path.stem}-{number}")
    for path in sorted(HERE.glob("*.json"))
    for number, case in enumerate(json.loads(path.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_recorded_call_gives_the_recorded_result(name: str, case: Case) -> None:
    call, inputs, expected = CALLS[name], case["inputs"], case["expected"]
    if expected == "error":
        with pytest.raises(BatchError):
            call(inputs)
        return
    assert narrowed(call(inputs), expected) == expected


def narrowed(found: Any, expected: Any) -> Any:
    """`found` as JSON has it, with only the keys that were recorded; numbers must be Python's own."""
    if isinstance(expected, dict):
        return {name: narrowed(found[name], value) for name, value in expected.items()}
    if isinstance(expected, list):
        if len(found) != len(expected):
            return found
        return [narrowed(part, value) for part, value in zip(found, expected, strict=True)]
    assert type(found) is type(expected)
    return found
