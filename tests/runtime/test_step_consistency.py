"""Fields of a step that say the same thing agree, or the step is refused with the field's name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from model_layers import layer
from served_model import ServedModel

from attnplug.core import CommonAttentionMetadata
from attnplug.core.errors import BatchError
from attnplug.runtime import StepBatch, StepBatchBuilder
from attnplug.testing import direct_batch

FULL = layer(dtype="float32")
SLIDING = layer(dtype="float32", sliding_window=20)
CROSS = layer(dtype="float32", attn_type="encoder_decoder")
DIRECT = layer(dtype="float32", direct_kv=True)
TOKENS = {"r": 3, "s": 7}


def begun(**specs: Any) -> tuple[ServedModel, StepBatch]:
    specs = specs or {"0": FULL, "1": SLIDING}
    model = ServedModel(specs, max_encoder_len=24 if "cross" in specs else 0)
    for name in TOKENS:
        model.add(name, encoder_len=9 if "cross" in specs else 0)
    model.step(r=20, s=9)
    batch = model.begin(**TOKENS)
    model.runtime.end_step()
    return model, batch


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


COMMON: dict[str, tuple[Callable[[CommonAttentionMetadata], dict[str, Any]], str]] = {
    "fewer requests": (lambda c: {"num_reqs": 1}, r"query_start_loc=\(3,\) must be of shape \[2\]"),
    "more requests": (lambda c: {"num_reqs": 3}, r"query_start_loc=\(3,\) must be of shape \[4\]"),
    "requests as a tensor": (lambda c: {"num_reqs": torch.tensor(2)}, "num_reqs=.* must be an int"),
    "no tokens": (lambda c: {"num_actual_tokens": 0}, "query_start_loc_cpu=10 must end at or before"),
    "tokens of nobody": (lambda c: {"num_actual_tokens": 11}, r"slot_mapping=\(10,\) must have a slot for each"),
    "negative tokens": (lambda c: {"num_actual_tokens": -1}, "num_actual_tokens=-1 must be an int of at least 0"),
    "zeros on the host": (lambda c: {"query_start_loc_cpu": ints(0, 0, 0)}, r"query_start_loc\[1\]=3 must equal 0"),
    "other starts on the host": (lambda c: {"query_start_loc_cpu": ints(0, 7, 10)}, r"query_start_loc\[1\]=3 must equal 7"),
    "other starts on the device": (lambda c: {"query_start_loc": ints(0, 4, 10)}, r"query_start_loc\[1\]=4 must equal 3"),
    "starts that decrease": (lambda c: {"query_start_loc_cpu": ints(0, 11, 10)}, "must start at 0 and not decrease"),
    "starts that begin later": (lambda c: {"query_start_loc_cpu": ints(1, 3, 10)}, "must start at 0"),
    "starts without a host": (lambda c: {"query_start_loc_cpu": None}, "query_start_loc_cpu=None is required"),
    "long starts": (lambda c: {"query_start_loc": c.query_start_loc.long()}, "dtype=.*int64.* must be torch.int32"),
    "other lengths on the host": (lambda c: {"seq_lens_host": np.array([9, 9], dtype=np.int32)}, r"seq_lens\[0\]=23 must equal 9"),
    "other lengths on the device": (lambda c: {"seq_lens": ints(23, 17)}, r"seq_lens\[1\]=17 must equal 16"),
    "bounds that are too small": (
        lambda c: {"seq_lens_host": np.array([22, 16], dtype=np.int32), "seq_lens_host_exact": False},
        r"seq_lens\[0\]=23 must not pass 22",
    ),
    "negative lengths": (lambda c: {"seq_lens_host": np.array([-1, 16], dtype=np.int32)}, "seq_lens_host=-1 must not be negative"),
    "lengths of one request": (lambda c: {"seq_lens_host": np.array([23], dtype=np.int32)}, r"seq_lens_host=\(1,\) must be a numpy array of 2"),
    "lengths as a tensor": (lambda c: {"seq_lens_host": c.seq_lens}, "seq_lens_host=.* must be a numpy array"),
    "a short longest sequence": (lambda c: {"max_seq_len": 16}, "max_seq_len=16 must be at least 23"),
    "a short longest query": (lambda c: {"max_query_len": 3}, "max_query_len=3 must be 7"),
    "a flat table": (lambda c: {"block_table_tensor": c.block_table_tensor[0]}, r"block_table_tensor=.* must be of shape \[2, max_blocks\]"),
    "a table of one request": (lambda c: {"block_table_tensor": c.block_table_tensor[:1]}, r"must be of shape \[2, max_blocks\]"),
    "another table": (lambda c: {"block_table_tensor": c.block_table_tensor + 1}, "must be the table of KV group 0"),
    "a long table": (lambda c: {"block_table_tensor": c.block_table_tensor.long()}, "block_table_tensor.dtype=.*int64"),
    "other slots": (lambda c: {"slot_mapping": c.slot_mapping + 1}, "must be the slots of KV group 0"),
    "few slots": (lambda c: {"slot_mapping": c.slot_mapping[:9]}, r"slot_mapping=\(9,\) must have a slot for each"),
    "short slots": (lambda c: {"slot_mapping": c.slot_mapping.int()}, "slot_mapping.dtype=.*int32"),
    "logits of nobody": (
        lambda c: {"num_logits_indices": 2, "logits_indices_padded": ints(2, 10), "logits_indices_cpu": ints(2, 10)},
        r"logits_indices_cpu=\[2, 10\] must be in 0 .. 9",
    ),
    "other logits": (
        lambda c: {"num_logits_indices": 2, "logits_indices_padded": ints(2, 8), "logits_indices_cpu": ints(2, 9)},
        r"logits_indices_padded\[1\]=8 must equal 9",
    ),
    "more logits than indices": (
        lambda c: {"num_logits_indices": 3, "logits_indices_padded": ints(2, 9)},
        "num_logits_indices=3 must be in",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), COMMON.values(), ids=COMMON)
def test_a_field_of_the_step_that_contradicts_another(
    change: Callable[[CommonAttentionMetadata], dict[str, Any]], message: str
) -> None:
    model, batch = begun()
    for in_place in (False, True):
        common = batch.common if in_place else dataclasses.replace(batch.common)
        for name, value in change(common).items():
            setattr(common, name, value)
        changed = batch if in_place else dataclasses.replace(batch, common=common)
        with pytest.raises(BatchError, match=message):
            model.runtime.begin_step(changed)


BATCH: dict[str, tuple[Callable[[StepBatch], dict[str, Any]], str]] = {
    "tables of one request": (lambda b: {"block_tables": b.block_tables[:, :1]}, "block_tables=.* a row for each request"),
    "flat tables": (lambda b: {"block_tables": b.block_tables[:, 0]}, "block_tables=.* must be of shape"),
    "slots of one group": (lambda b: {"slot_mappings": b.slot_mappings[:1]}, "slot_mappings=1 must be 2 KV groups"),
    "fewer slots": (lambda b: {"num_slots": (10, 9)}, "num_slots=9 must be 10 in KV group 1"),
    "slots of one count": (lambda b: {"num_slots": (10,)}, "slot_mappings=1 must be 2 KV groups"),
    "short slots": (lambda b: {"slot_mappings": b.slot_mappings[:, :9]}, "num_slots=10 is past the 9 slots"),
    "another first group": (lambda b: {"common_group": 1}, "must be the table of KV group 1"),
    "a group of nobody": (lambda b: {"common_group": 2}, "common_group=2 must be one of 2 KV groups"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BATCH.values(), ids=BATCH)
def test_a_field_of_the_batch_that_contradicts_another(
    change: Callable[[StepBatch], dict[str, Any]], message: str
) -> None:
    model, batch = begun()
    with pytest.raises(BatchError, match=message):
        model.runtime.begin_step(dataclasses.replace(batch, **change(batch)))


def test_a_slot_that_is_not_where_the_table_has_its_token() -> None:
    model, batch = begun()
    slots = batch.slot_mappings.clone()
    batch.slot_mappings[1, 4] += 1
    with pytest.raises(
        BatchError, match=r"slot_mappings\[1, 4\]=\d+ is not where the table of request 1 of the batch"
    ):
        model.runtime.begin_step(batch)
    batch.slot_mappings.copy_(slots)
    batch.block_tables[0, 1, 0] = batch.block_tables[0, 0, 1]
    with pytest.raises(BatchError, match=r"slot_mappings\[0, 3\]=\d+ is not where the table of request 1"):
        model.runtime.begin_step(batch)


def test_two_tokens_of_one_slot_in_debug_mode() -> None:
    model, _ = begun()
    specs = [group.kv_cache_spec for group in model.groups]
    # Without the size of the pool, a builder does not know which requests have a block.
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    batches = StepBatchBuilder(**sizes, block_sizes=[16, 16], kv_cache_specs=specs)
    for name in ("a", "b"):
        batches.add_request(name, [[3, 4], [5, 6]], num_computed_tokens=20)
    with pytest.raises(BatchError, match=r"is the slot of token 0 of the batch too"):
        model.runtime.begin_step(batches.step(1))


def test_encoder_lengths_that_differ() -> None:
    model, batch = begun(self=FULL, cross=CROSS)
    common = dataclasses.replace(batch.common, encoder_seq_lens=ints(9, 8))
    with pytest.raises(BatchError, match=r"batch.common.encoder_seq_lens\[1\]=8 must equal 9"):
        model.runtime.begin_step(dataclasses.replace(batch, common=common))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key_start_loc": ints(0, 8, 21)}, r"direct.key_start_loc\[1\]=8 must equal 9"),
        (
            {"key_start_loc_cpu": ints(0, 9, 40), "key_start_loc": ints(0, 9, 40)},
            r"direct.key_start_loc_cpu=31 gives request 1 more keys than its 20",
        ),
        ({"key_start_loc": ints(0, 9)}, r"direct.key_start_loc=\(2,\) must be of shape \[3\]"),
        ({"num_reqs": 1}, r"direct.query_start_loc=\(3,\) must be of shape \[2\]"),
        ({"seq_lens": ints(9, 19)}, r"direct.seq_lens\[1\]=19 must equal 20"),
    ],
)
def test_a_step_with_keys_in_the_call_that_contradicts_itself(fields: dict[str, Any], message: str) -> None:
    model = ServedModel({"0": FULL, "direct": DIRECT})
    common = direct_batch(DIRECT, [1, 4], [9, 20], key_lens=[9, 12]).common
    model.runtime.begin_step(direct=common)
    with pytest.raises(BatchError, match=message):
        model.runtime.begin_step(direct=dataclasses.replace(common, **fields))
