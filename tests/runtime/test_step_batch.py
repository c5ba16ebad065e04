"""The persistent batch, step by step: what comes out, and what is refused."""

from __future__ import annotations

from collections import Counter, defaultdict
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from attnplug.core.batch import reorder_batch_to_split_decodes_and_prefills
from attnplug.core.errors import BatchError
from attnplug.runtime import StepBatch, StepBatchBuilder


def builder(**changes: Any) -> StepBatchBuilder:
    """At most 4 requests of 32 tokens, 16 in a step, one KV group with pages of 4."""
    sizes: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 32,
        "block_sizes": [4],
    }
    return StepBatchBuilder(**sizes | changes)


def with_cross(**changes: Any) -> StepBatchBuilder:
    """A decoder group with pages of 4, and one of encoder tokens with pages of 2."""
    return builder(block_sizes=[4, 2], cross_groups=[1], max_encoder_len=6, **changes)


def state(made: StepBatchBuilder) -> list[Any]:
    """Everything that the next step depends on."""
    reqs = made.num_reqs
    found: list[Any] = [
        list(made.req_ids),
        dict(made._requests.index),
        dict(made._requests.placeholders),
        made._requests.stepped,
    ]
    held = made._requests.num_blocks[:, :reqs]
    found.append(held.tolist())
    for group, row in np.ndindex(*held.shape):
        found.append(made._requests.tables[group, row, : held[group, row]].tolist())
    arrays = (
        made._requests.computed,
        made._requests.scheduled,
        made._requests.first_served,
        made._requests.capacity,
        made._requests.encoder_lens,
        made._requests.encoder_written,
        made._requests.placeholder_end,
    )
    return found + [array[:reqs].tolist() for array in arrays]


def check_invariants(batch: StepBatch) -> None:
    common = batch.common
    assert common.num_actual_tokens == common.query_start_loc_cpu[-1] == common.slot_mapping.shape[0]
    assert common.query_start_loc.tolist() == common.query_start_loc_cpu.tolist()
    assert common.seq_lens_host is not None
    assert common.seq_lens_host_exact
    assert common.seq_lens.tolist() == common.seq_lens_host.tolist()
    assert common.query_start_loc.dtype == common.seq_lens.dtype == torch.int32
    assert common.block_table_tensor.dtype == torch.int32
    assert common.slot_mapping.dtype == torch.int64


# A step


def test_a_prefill_and_a_decode():
    made = builder()
    assert made.add_request("a", [[3, 5]], num_computed_tokens=5) == 0
    assert made.add_request("b", [[7, 2]]) == 1
    batch = made.step([1, 6])
    check_invariants(batch)
    common = batch.common
    assert common.query_start_loc_cpu.tolist() == [0, 1, 7]
    assert common.seq_lens.tolist() == [6, 6]
    assert (common.num_reqs, common.num_actual_tokens) == (2, 7)
    assert (common.max_query_len, common.max_seq_len) == (6, 6)
    assert common.slot_mapping.tolist() == [5 * 4 + 1, *range(28, 32), 8, 9]
    assert common.block_table_tensor[:, :2].tolist() == [[3, 5], [7, 2]]
    assert common.causal is None
    assert batch.req_ids == ("a", "b")
    assert batch.num_slots == (7,)
    assert batch.placeholders == {}
    assert common.encoder_seq_lens is None


def test_finished_steps_go_on_where_the_last_one_ended():
    made = builder()
    made.add_request("a", [[3, 5]])
    made.step(3)
    made.finish_step()
    assert made.num_computed_tokens_cpu.tolist() == [3]
    assert made.step().common.slot_mapping.tolist() == [15]
    made.finish_step()
    assert made.step(2).common.slot_mapping.tolist() == [20, 21]


def test_a_step_made_again_is_the_same_step():
    made = builder()
    made.add_request("a", [[3]])
    assert made.step(3).common.slot_mapping.tolist() == made.step(3).common.slot_mapping.tolist()
    made.finish_step()
    assert made.num_computed_tokens_cpu.tolist() == [3]


@pytest.mark.parametrize(
    "counts", [{"a": 2, "b": 1}, [2, 1], (2, 1), np.array([2, 1], np.int32), torch.tensor([2, 1])]
)
def test_counts_come_as_a_mapping_or_in_order(counts):
    made = builder()
    made.add_request("a", [[1]])
    made.add_request("b", [[2]])
    assert made.step(counts).common.query_start_loc_cpu.tolist() == [0, 2, 3]


@pytest.mark.parametrize("count", [3, np.int32(3), np.array(3)])
def test_one_number_is_for_all(count):
    made = builder()
    made.add_request("a", [[1]])
    made.add_request("b", [[2]])
    assert made.step(count).common.query_start_loc_cpu.tolist() == [0, 3, 6]


def test_a_request_may_run_no_token():
    made = builder()
    for name, block in (("a", 1), ("b", 2), ("c", 3)):
        made.add_request(name, [[block]], num_computed_tokens=2)
    common = made.step([0, 2, 0]).common
    assert common.query_start_loc_cpu.tolist() == [0, 0, 2, 2]
    assert common.seq_lens.tolist() == [2, 4, 2]
    assert common.slot_mapping.tolist() == [10, 11]
    common = made.step(0).common
    assert (common.num_actual_tokens, common.max_query_len, common.max_seq_len) == (0, 0, 2)


@pytest.mark.parametrize(
    "counts", [{"b": 2}, MappingProxyType({"b": 2}), Counter(b=2), defaultdict(int, b=2)]
)
def test_a_request_that_a_mapping_leaves_out_runs_no_token(counts):
    made = builder()
    for name, block in (("a", 1), ("b", 2), ("c", 3)):
        made.add_request(name, [[block]], num_computed_tokens=2)
    batch = made.step(counts)
    check_invariants(batch)
    assert batch.req_ids == ("a", "b", "c")
    assert batch.common.query_start_loc_cpu.tolist() == [0, 0, 2, 2]
    assert batch.common.seq_lens.tolist() == [2, 4, 2]
    assert batch.common.slot_mapping.tolist() == [10, 11]
    assert dict(counts) == {"b": 2}
    made.finish_step()
    assert made.num_computed_tokens_cpu.tolist() == [2, 4, 2]
    assert made.step({}).common.num_actual_tokens == 0


def test_accepted_counts_may_leave_out_requests_that_ran_no_token():
    made = builder()
    for name, block in (("a", 1), ("b", 2)):
        made.add_request(name, [[block]], num_computed_tokens=1)
    made.step({"b": 3})
    before = state(made)
    with pytest.raises(
        BatchError, match="accepted='b' has no count: every request with tokens needs one, and it has 3"
    ):
        made.finish_step({"a": 0})
    with pytest.raises(BatchError, match=r"accepted=\['z'\] are not in flight"):
        made.finish_step({"b": 1, "z": 0})
    assert state(made) == before
    made.finish_step({"b": 1})
    assert made.num_computed_tokens_cpu.tolist() == [1, 2]


def test_a_token_too_many_for_one_request_and_none_for_another_is_no_decode_batch():
    made = builder()
    made.add_request("a", [[1]])
    made.add_request("b", [[2]])
    assert made.step([2, 0]).common.slot_mapping.tolist() == [4, 5]


def test_a_batch_of_nobody_is_empty():
    batch = builder().step()
    check_invariants(batch)
    assert batch.common.num_reqs == batch.common.max_query_len == batch.common.max_seq_len == 0
    assert batch.common.query_start_loc_cpu.tolist() == [0]
    assert batch.req_ids == ()


def test_1024_requests_of_one_token_each():
    made = builder(max_num_seqs=1024, max_num_batched_tokens=1024)
    for index in range(1024):
        made.add_request(str(index), [[index + 1]], num_computed_tokens=index % 4)
    batch = made.step()
    check_invariants(batch)
    assert batch.common.slot_mapping.tolist() == [(i + 1) * 4 + i % 4 for i in range(1024)]
    assert batch.common.query_start_loc_cpu.tolist() == list(range(1025))


@pytest.mark.parametrize("sizes", [[16], [16, 16], [16, 32]])
def test_slots_past_2_to_the_31_stay_whole(sizes):
    made = builder(block_sizes=sizes)
    block = 2**28 + 3
    made.add_request("a", [[block]] * len(sizes), num_computed_tokens=5)
    batch = made.step(2)
    for group, size in enumerate(sizes):
        assert batch.of_group(group)[1].tolist() == [block * size + 5, block * size + 6]


# KV groups


@pytest.mark.parametrize("sizes", [[4, 4, 4], [4, 2, 8]])
def test_each_group_has_its_own_table_and_slots(sizes):
    made = builder(block_sizes=sizes)
    tables = [[3, 9], [4, 8, 11, 12], [6, 5]]
    made.add_request("a", tables, num_computed_tokens=2)
    batch = made.step(4)
    for group, size in enumerate(sizes):
        table, slots = batch.of_group(group)
        assert table[0, : len(tables[group])].tolist() == tables[group]
        expected = [tables[group][p // size] * size + p % size for p in range(2, 6)]
        assert slots.tolist() == expected
    assert batch.common_group == 0
    assert batch.common.slot_mapping.tolist() == batch.of_group(0)[1].tolist()


def test_pages_can_be_appended_group_by_group():
    made = builder(block_sizes=[4, 4])
    made.add_request("a", [[1], [2]], num_computed_tokens=4)
    with pytest.raises(BatchError, match="KV group 0"):
        made.step()
    made.append_blocks("a", [[3], []])
    with pytest.raises(BatchError, match="KV group 1"):
        made.step()
    made.append_blocks("a", [[], [4]])
    assert made.step().slot_mappings.tolist() == [[12], [16]]


def test_a_request_may_get_its_first_pages_later():
    made = builder()
    made.add_request("a")
    with pytest.raises(BatchError, match="past the 0 tokens of its pages"):
        made.step()
    made.append_blocks("a", [[3]])
    assert made.step(2).common.slot_mapping.tolist() == [12, 13]


def test_on_a_device_tables_are_as_wide_as_the_longest_and_in_one_piece():
    made = builder(block_sizes=[4, 4], device="meta")
    made.add_request("a", [[1, 2, 3], [4, 5, 6]])
    made.add_request("b", [[1], [4, 5]])
    batch = made.step([9, 2])
    assert batch.block_tables.shape == (2, 2, 3)
    assert batch.slot_mappings.shape == (2, 11)
    assert batch.block_tables.is_contiguous()
    assert batch.slot_mappings.is_contiguous()
    assert {batch.common.seq_lens.device.type, batch.common.query_start_loc.device.type} == {"meta"}
    assert batch.common.query_start_loc_cpu.tolist() == [0, 9, 11]
    assert builder(device="meta").profile_step(2, 9).block_tables.shape == (1, 2, 8)


# Requests


def test_the_last_request_takes_the_place_of_one_that_leaves():
    made = builder()
    for index, name in enumerate("abc"):
        made.add_request(name, [[index + 1]], num_computed_tokens=index)
    made.remove_request("a")
    assert made.req_ids == ["c", "b"]
    assert made.step().common.slot_mapping.tolist() == [3 * 4 + 2, 2 * 4 + 1]
    made.remove_request("b")
    made.remove_request("c")
    assert made.num_reqs == 0
    assert made.add_request("a", [[7]]) == 0
    assert made.step().common.slot_mapping.tolist() == [28]


def test_a_name_that_left_starts_afresh():
    made = with_cross()
    made.add_request("a", [[1, 2], [3]], num_computed_tokens=5, encoder_len=2)
    made.step()
    made.finish_step()
    made.remove_request("a")
    made.add_request("a", [[4], [5, 6]], encoder_len=3)
    batch = made.step()
    assert batch.of_group(0)[1].tolist() == [16]
    assert batch.of_group(1)[1].tolist() == [10, 11, 12]


def test_swapped_requests_keep_everything():
    made = with_cross()
    made.add_request("a", [[1, 2], [3]], num_computed_tokens=5, encoder_len=2)
    made.add_request("b", [[4], [5, 6]], num_computed_tokens=1, encoder_len=3)
    made.swap_states(0, 1)
    batch = made.step()
    assert batch.req_ids == ("b", "a")
    assert batch.of_group(0)[1].tolist() == [17, 9]
    assert batch.of_group(1)[1].tolist() == [10, 11, 12, 6, 7]
    assert batch.common.encoder_seq_lens_cpu.tolist() == [3, 2]
    made.append_blocks("a", [[7], []])
    assert made._requests.tables[0, 1, :3].tolist() == [1, 2, 7]


def test_the_builder_is_the_input_batch_that_reordering_takes():
    class Scheduled:
        num_scheduled_tokens: ClassVar[dict[str, int]] = {"prefill": 5, "decode": 1, "extend": 4, "late": 1}

    made = builder(block_sizes=[4, 8])
    made.add_request("prefill", [[1, 2], [1]])
    made.add_request("late", [[3], [3]], num_computed_tokens=2)
    made.add_request("extend", [[4, 5], [4]], num_computed_tokens=3)
    made.add_request("decode", [[6], [6]], num_computed_tokens=1)
    assert reorder_batch_to_split_decodes_and_prefills(made, Scheduled())
    assert made.req_ids == ["decode", "late", "extend", "prefill"]
    common = made.step(Scheduled.num_scheduled_tokens).common
    assert common.query_start_loc_cpu.tolist() == [0, 1, 2, 6, 11]
    assert common.slot_mapping.tolist() == [25, 14, 19, 20, 21, 22, 4, 5, 6, 7, 8]
    assert not reorder_batch_to_split_decodes_and_prefills(made, Scheduled())


# Pages that a window has passed


def test_freed_pages_point_to_the_null_block_and_positions_stay():
    made = builder(block_sizes=[4, 4])
    made.add_request("a", [[1, 2, 3], [4, 5, 6]], num_computed_tokens=9)
    made.free_blocks("a", 1, 2)
    batch = made.step()
    assert batch.of_group(1)[0][0, :3].tolist() == [0, 0, 6]
    assert batch.of_group(0)[0][0, :3].tolist() == [1, 2, 3]
    assert batch.of_group(1)[1].tolist() == [25]


@pytest.mark.parametrize("sizes", [[4, 4], [4, 8]])
def test_what_falls_into_the_null_block_is_not_written(sizes):
    made = builder(block_sizes=sizes)
    made.add_request("a", [[1, 2, 3], [0, 5, 6]])
    batch = made.step(12)
    size = sizes[1]
    assert batch.of_group(0)[1].tolist() == list(range(4, 16))
    kept = [5 * size + p - size if p < 2 * size else 6 * size + p - 2 * size for p in range(size, 12)]
    assert batch.of_group(1)[1].tolist() == [-1] * size + kept


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("b", 0, 1), "req_id='b' is not in flight"),
        (("a", 1, 1), "group=1 must be a KV group of decoder tokens: [0]"),
        (("a", 0, 3), "num_blocks=3 must be in 0 .. 2, the pages computed in full"),
        (("a", 0, -1), "num_blocks=-1 must be in 0 .. 2"),
    ],
)
def test_only_pages_computed_in_full_can_be_freed(given, said):
    made = with_cross()
    made.add_request("a", [[1, 2, 3], [4]], num_computed_tokens=9, encoder_len=2)
    before = state(made)
    with pytest.raises(BatchError) as error:
        made.free_blocks(*given)
    assert said in str(error.value)
    assert state(made) == before


# Encoder-decoder batches


def test_encoder_tokens_are_written_on_a_requests_first_step_only():
    made = with_cross()
    made.add_request("a", [[1], [3, 4]], encoder_len=3)
    batch = made.step(2)
    assert batch.cross_groups == frozenset({1})
    assert batch.num_slots == (2, 3)
    assert batch.of_group(0)[1].tolist() == [4, 5]
    assert batch.of_group(1)[1].tolist() == [6, 7, 8]
    made.finish_step()
    made.add_request("b", [[2], [7]], encoder_len=2)
    batch = made.step(1)
    assert batch.of_group(0)[1].tolist() == [6, 8]
    assert batch.of_group(1)[1].tolist() == [14, 15]
    assert batch.common.encoder_seq_lens.tolist() == [3, 2]
    assert batch.common.encoder_seq_lens_cpu.tolist() == [3, 2]
    made.finish_step()
    assert made.step(1).of_group(1)[1].tolist() == []


def test_a_request_that_runs_no_token_does_not_write_its_encoder_yet():
    made = with_cross()
    made.add_request("a", [[1], []], encoder_len=3)
    assert made.step(0).of_group(1)[1].tolist() == []  # nor does it need the pages
    made.finish_step()
    made.append_blocks("a", [[], [3, 4]])
    assert made.step(1).of_group(1)[1].tolist() == [6, 7, 8]


def test_a_step_that_was_not_finished_writes_the_encoder_again():
    made = with_cross()
    made.add_request("a", [[1], [3, 4]], encoder_len=3)
    made.step(1)
    assert made.step(1).of_group(1)[1].tolist() == [6, 7, 8]
    made.finish_step([0])  # the decoder's token was not accepted; the encoder's are stored
    assert made.step(1).of_group(1)[1].tolist() == []


def test_encoder_tokens_may_outnumber_a_steps_tokens():
    made = with_cross(max_num_batched_tokens=4)
    for index in range(4):
        made.add_request(str(index), [[index + 1], [3 * index + 1, 3 * index + 2, 3 * index + 3]], 0, 6)
    batch = made.step()
    assert batch.num_slots == (4, 24)
    assert batch.of_group(1)[1].tolist() == list(range(2, 26))
    assert batch.common.slot_mapping.tolist() == [4, 8, 12, 16]


def test_a_model_of_cross_attention_only_needs_no_other_pages():
    made = builder(block_sizes=[2], cross_groups=[0], max_encoder_len=6)
    made.add_request("a", [[1, 2]], encoder_len=4)
    batch = made.step(3)
    assert batch.of_group(0)[1].tolist() == [2, 3, 4, 5]
    assert batch.common.num_actual_tokens == 3
    made.append_blocks("a", [[5]])
    assert made.step(3).common.seq_lens.tolist() == [3]


# Speculation


def test_only_accepted_tokens_are_computed():
    made = builder()
    made.add_request("a", [[1, 2]], num_computed_tokens=2)
    made.add_request("b", [[3, 4]], num_computed_tokens=3)
    made.step([3, 3])
    made.finish_step([1, 3])
    assert made.num_computed_tokens_cpu.tolist() == [3, 6]
    assert made.step(1).common.slot_mapping.tolist() == [7, 18]


@pytest.mark.parametrize("accepted", [{"a": 1, "b": 0}, [1, 0], np.array([1, 0])])
def test_accepted_tokens_come_as_counts_do(accepted):
    made = builder()
    made.add_request("a", [[1]])
    made.add_request("b", [[2]])
    made.step(2)
    made.finish_step(accepted)
    assert made.num_computed_tokens_cpu.tolist() == [1, 0]


def test_one_accepted_number_is_for_all():
    made = builder()
    made.add_request("a", [[1]])
    made.add_request("b", [[2]])
    made.step(2)
    made.finish_step(1)
    assert made.num_computed_tokens_cpu.tolist() == [1, 1]


def test_tokens_of_several_steps_are_rolled_back_and_written_again():
    made = builder(block_sizes=[4, 2])
    made.add_request("a", [[1, 2], [1, 2, 3, 4]], num_computed_tokens=2)
    made.add_request("b", [[3, 4], [5, 6, 7, 8]], num_computed_tokens=3)
    for _ in range(3):
        made.step(1)
        made.finish_step()
    made.rollback({"b": 3, "a": 1})
    assert made.num_computed_tokens_cpu.tolist() == [4, 3]
    batch = made.step(2)
    assert batch.common.seq_lens.tolist() == [6, 5]
    assert batch.of_group(0)[1].tolist() == [8, 9, 15, 16]
    assert batch.of_group(1)[1].tolist() == [6, 7, 13, 14]
    made.finish_step()
    made.rollback(0)
    made.rollback(np.array([6, 0]))
    assert made.num_computed_tokens_cpu.tolist() == [0, 5]


def test_a_rollback_goes_to_where_pages_were_last_freed_and_no_further():
    made = builder()
    made.add_request("a", [[1, 2, 3]], num_computed_tokens=9)
    made.add_request("b", [[0, 4, 5]], num_computed_tokens=6)
    made.add_request("c", [[6, 7, 8]], num_computed_tokens=9)
    made.free_blocks("a", 0, 1)
    for _ in range(2):
        made.step(1)
        made.finish_step()
    made.free_blocks("a", 0, 1)  # freed before: it makes nothing worse
    made.swap_states(0, 2)
    made.rollback({"a": 2, "b": 2, "c": 2})
    assert made.num_computed_tokens_cpu.tolist() == [9, 6, 9]
    before = state(made)
    for name, token in (("a", 9), ("b", 6)):
        with pytest.raises(BatchError) as error:
            made.rollback({"a": 0, "b": 0, "c": 1} | {name: 1})
        said = f"num_tokens=1 of request {name} goes to before token {token}, where pages were freed"
        assert said in str(error.value)
        assert state(made) == before
    made.remove_request("a")
    made.add_request("a", [[1, 2, 3]], num_computed_tokens=9)
    made.rollback({"a": 9, "b": 0, "c": 9})
    assert made.step(1).common.seq_lens.tolist() == [1, 7, 1]


def test_a_step_that_is_not_finished_cannot_be_rolled_back():
    made = builder()
    made.add_request("a", [[1]], num_computed_tokens=2)
    made.step()
    before = state(made)
    with pytest.raises(BatchError, match="cannot be rolled back; call finish_step first"):
        made.rollback(1)
    assert state(made) == before


def test_a_rollback_may_leave_out_requests_without_tokens():
    made = builder()
    made.add_request("a", [[1]], num_computed_tokens=2)
    made.add_request("b", [[2]])
    made.rollback({"a": 1})
    assert made.num_computed_tokens_cpu.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([1], "num_tokens=(1,) must be one count for each of 2 requests"),
        ([0, 4], "num_tokens=4 of request b must be in 0 .. 3, its computed tokens"),
        ([-1, 0], "num_tokens=-1 of request a must be in 0 .. 2, its computed tokens"),
        ({"a": 1}, "num_tokens='b' has no count"),
        ([0.5, 1], "num_tokens=[0.5, 1] must be integers"),
    ],
)
def test_a_rollback_that_is_refused_names_what_is_wrong_and_changes_nothing(counts, said):
    made = builder()
    made.add_request("a", [[1]], num_computed_tokens=2)
    made.add_request("b", [[2]], num_computed_tokens=3)
    before = state(made)
    with pytest.raises(BatchError) as error:
        made.rollback(counts)
    assert said in str(error.value)
    assert state(made) == before


def test_a_step_is_finished_for_whoever_is_left_of_it():
    made = builder()
    for index, name in enumerate("abc"):
        made.add_request(name, [[index + 1]])
    made.step([1, 2, 3])
    made.remove_request("a")
    made.add_request("d", [[9]])
    made.swap_states(0, 1)
    made.finish_step()
    assert dict(zip(made.req_ids, made.num_computed_tokens_cpu.tolist(), strict=True)) == {
        "b": 2,
        "c": 3,
        "d": 0,
    }


def test_accepted_tokens_go_by_request_once_requests_have_changed():
    made = builder()
    made.add_request("a", [[1]])
    made.add_request("b", [[2]])
    made.step(3)
    made.swap_states(0, 1)
    before = state(made)
    with pytest.raises(BatchError, match="requests changed since the step; give the counts by request"):
        made.finish_step([1, 2])
    assert state(made) == before
    made.finish_step({"a": 1, "b": 2})
    assert made.num_computed_tokens_cpu.tolist() == [2, 1]


def test_counts_that_the_caller_changes_later_are_not_counted():
    made = builder()
    made.add_request("a", [[1]])
    counts = np.array([2], dtype=np.int64)
    made.step(counts)
    counts[0] = 3
    made.finish_step()
    assert made.num_computed_tokens_cpu.tolist() == [2]


def test_a_refused_step_does_not_change_the_one_before():
    made = builder()
    made.add_request("a", [[1]])
    made.step(2)
    with pytest.raises(BatchError):
        made.step(5)
    made.finish_step()
    assert made.num_computed_tokens_cpu.tolist() == [2]


# Profile runs


def test_a_profile_run_has_no_slots_and_only_null_pages():
    made = builder()
    batch = made.profile_step(3, 16)
    check_invariants(batch)
    assert batch.common.query_start_loc_cpu.tolist() == [0, 6, 11, 16]
    assert batch.common.seq_lens.tolist() == [6, 5, 5]
    assert (batch.common.max_query_len, batch.common.max_seq_len) == (6, 6)
    assert batch.common.slot_mapping.tolist() == [-1] * 16
    assert not batch.common.block_table_tensor.any()
    assert batch.common.block_table_tensor.shape == (3, 8)
    assert len(batch.req_ids) == 3
    assert made.num_reqs == 0


def test_a_profile_run_has_the_longest_encoders():
    made = with_cross()
    made.add_request("a", [[1], [2]], encoder_len=1)
    made.remove_request("a")
    batch = made.profile_step(2, 4)
    assert batch.num_slots == (4, 12)
    assert batch.of_group(1)[1].tolist() == [-1] * 12
    assert batch.common.encoder_seq_lens.tolist() == [6, 6]
    assert not batch.of_group(1)[0].any()
    assert batch.of_group(1)[0].shape[1] * 2 >= 6


def test_requests_start_clean_after_a_profile_run():
    made = builder()
    made.profile_step(4, 16)
    with pytest.raises(BatchError, match="step=None is required before finish_step"):
        made.finish_step()
    made.add_request("a", [[3]])
    assert made.step(2).common.slot_mapping.tolist() == [12, 13]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0, 4), "num_reqs=0 must be in 1 .. 4"),
        ((5, 8), "num_reqs=5 must be in 1 .. 4"),
        ((3, 2), "num_reqs=3 must be in 1 .. 2"),
        ((4, 17), "num_tokens=17 must not pass 16 with 4 requests"),
    ],
)
def test_a_profile_run_past_the_limits_is_refused(given, said):
    with pytest.raises(BatchError) as error:
        builder().profile_step(*given)
    assert said in str(error.value)


def test_a_profile_run_of_sequences_past_the_model_is_refused():
    with pytest.raises(BatchError, match="num_tokens=12 must not pass 8 with 1 requests"):
        builder(max_model_len=8).profile_step(1, 12)


def test_a_profile_run_comes_before_any_request():
    made = builder()
    made.add_request("a", [[1]])
    with pytest.raises(BatchError, match="num_reqs=1 requests are in flight; profile before adding any"):
        made.profile_step(1, 1)


# Refusals


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be in 1 .. 2147483647"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0 must be in 1"),
        ({"max_model_len": 2**31}, "max_model_len=2147483648 must be in 1 .. 2147483647"),
        ({"num_blocks": 0}, "num_blocks=0 must be in 1 .. 2147483647"),
        ({"block_sizes": []}, "block_sizes=0 must be in 1"),
        ({"block_sizes": [4, 0]}, "block_sizes=0 must be in 1"),
        ({"cross_groups": [1], "max_encoder_len": 4}, "cross_groups=[1] must be indices of 1 KV groups"),
        ({"cross_groups": [0]}, "max_encoder_len=0 must be in 1 .. 2147483647 with cross_groups"),
        ({"max_encoder_len": 4}, "max_encoder_len=4 is for builders with cross_groups"),
    ],
)
def test_a_builder_of_no_size_is_refused(changes, said):
    with pytest.raises(BatchError) as error:
        builder(**changes)
    assert said in str(error.value)


BAD_CALLS: list[tuple[str, tuple[Any, ...], str]] = [
    ("add_request", ("a",), "req_id='a' is in flight already"),
    ("add_request", ("c", [[1], [2]], -1), "num_computed_tokens=-1 must be in 0 .. 31"),
    ("add_request", ("c", [[1], [2]], 32), "num_computed_tokens=32 must be in 0 .. 31"),
    ("add_request", ("c", [[1], [2]], 0, -1), "encoder_len=-1 must be in 0 .. 6"),
    ("add_request", ("c", [[1], [2]], 0, 7), "encoder_len=7 must be in 0 .. 6"),
    ("add_request", ("c", [[1]]), "block_ids=1 must have one sequence for each of 2 KV groups"),
    ("add_request", ("c", [[1], [2] * 9]), "block_ids[1]=9 pages are past the table's 8"),
    ("add_request", ("c", [[1], [-1]]), "block_ids[1]=-1 must be in 0 .. 2147483647"),
    ("add_request", ("c", [[2**31], [1]]), "block_ids[0]=2147483648 must be in 0 .. 2147483647"),
    ("add_request", ("c", [[1], ["x"]]), "block_ids[1]=['x'] must be a sequence of block numbers"),
    ("add_request", ("c", [[1.5], [1]]), "block_ids[0]=[1.5] must be a sequence of block numbers"),
    ("add_request", ("c", [1, 2]), "block_ids[0]=1 must be a sequence of block numbers"),
    ("append_blocks", ("c", [[1], [2]]), "req_id='c' is not in flight"),
    ("append_blocks", ("a", [[1]]), "block_ids=1 must have one sequence for each of 2 KV groups"),
    ("append_blocks", ("a", [[1], [2] * 7]), "block_ids[1]=9 pages are past the table's 8"),
    ("append_blocks", ("a", [[1], [-3]]), "block_ids[1]=-3 must be in 0 .. 2147483647"),
    ("remove_request", ("c",), "req_id='c' is not in flight"),
    ("swap_states", (0, 2), "j=2 must be the index of one of 2 requests"),
    ("swap_states", (-1, 0), "i=-1 must be the index of one of 2 requests"),
    ("step", ([1],), "num_scheduled_tokens=(1,) must be one count for each of 2 requests"),
    ("step", ([[1, 1]],), "num_scheduled_tokens=(1, 2) must be one count for each of 2 requests"),
    ("step", ([1, [2]],), "must be integers, one for each request"),
    ("step", ([1, 1.5],), "num_scheduled_tokens=[1, 1.5] must be integers"),
    ("step", (1.0,), "num_scheduled_tokens=1.0 must be integers"),
    ("step", (2**70,), f"num_scheduled_tokens={2**70} must be integers"),
    ("add_request", ("c", [[1], [2]], 1.5), "num_computed_tokens=1.5 must be an integer"),
    ("add_request", ("c", [[1], [2]], True), "num_computed_tokens=True must be an integer"),
    ("add_request", ("c", [[1], [2]], 0, "3"), "encoder_len='3' must be an integer"),
    ("free_blocks", ("a", 0, 0.5), "num_blocks=0.5 must be an integer"),
    ("free_blocks", ("a", False, 1), "group=False must be an integer"),
    ("add_request", ("c", None), "block_ids=None must have one sequence for each of 2 KV groups"),
    ("step", ({"z": 1},), "num_scheduled_tokens=['z'] are not in flight"),
    ("step", ({"a": 1, 3: 1, None: 0},), "num_scheduled_tokens=[3, None] are not in flight"),
    ("step", ({"a": True, "b": 1},), "num_scheduled_tokens=[True, 1] must be integers"),
    ("step", ({"a": None},), "num_scheduled_tokens=[None, 0] must be integers"),
    ("step", ({"b": -1},), "num_scheduled_tokens=-1 of request b must not be negative"),
    ("step", ([1, True],), "num_scheduled_tokens=[1, True] must be integers"),
    ("step", ({"a": 1, "b": 1, "z": 2},), "num_scheduled_tokens=['z'] are not in flight"),
    ("step", ({"a": 1, "b": 1.5},), "num_scheduled_tokens=[1, 1.5] must be integers"),
    ("step", ([1, -2],), "num_scheduled_tokens=-2 of request b must not be negative"),
    ("step", ([16, 1],), "num_scheduled_tokens=17 in all must not pass max_num_batched_tokens=16"),
    ("step", ([2**63 - 1, 1],), f"num_scheduled_tokens={2**63 - 1} in all must not pass"),
    ("step", ([1, 2],), "seq_len=33 of request b is past max_model_len=32"),
    ("step", ([4, 1],), "seq_len=9 of request a is past the 8 tokens of its pages in KV group 0; append"),
    ("finish_step", ([1],), "accepted=(1,) must be one count for each of 2 requests"),
    ("finish_step", ([2, 0],), "accepted=2 of request a must be in 0 .. 1, its scheduled tokens"),
    ("finish_step", ([0, -1],), "accepted=-1 of request b must be in 0 .. 1"),
    ("finish_step", ({"a": 1},), "accepted='b' has no count"),
    ("finish_step", ([0.5, 1],), "accepted=[0.5, 1] must be integers"),
]


@pytest.mark.parametrize(("call", "given", "said"), BAD_CALLS)
def test_a_refused_call_names_what_is_wrong_and_changes_nothing(call, given, said):
    made = with_cross()
    made.add_request("a", [[1, 2], [3, 4]], num_computed_tokens=5, encoder_len=3)
    made.add_request("b", [[5, 6, 7, 8, 9, 10, 11, 12], [13]], num_computed_tokens=31, encoder_len=2)
    made.step(1)
    before = state(made)
    with pytest.raises(BatchError) as error:
        getattr(made, call)(*given)
    assert said in str(error.value)
    assert state(made) == before
    made.finish_step()
    assert made.num_computed_tokens_cpu.tolist() == [6, 32]


NOT_OF_THE_POOL: list[tuple[Any, str]] = [
    ([8], "=8 must be in 0 .. 7, the 8 blocks of the pool"),
    ([1, -1], "=-1 must be in 0 .. 7, the 8 blocks of the pool"),
    (np.array([7, 2**32 + 1]), f"={2**32 + 1} must be in 0 .. 7"),
    (np.array([2**64 - 1], np.uint64), f"={2**64 - 1} must be in 0 .. 7"),
    ([3, 2**70], f"={2**70} must be in 0 .. 7"),
    ([-(2**70), 2**70], f"={-(2**70)} must be in 0 .. 7"),
    (torch.tensor([1, 9]), "=9 must be in 0 .. 7"),
    ([True], "must be a sequence of block numbers"),
    ([1, True], "must be a sequence of block numbers"),
    ([2, np.True_], "must be a sequence of block numbers"),
    ([torch.tensor(True)], "must be a sequence of block numbers"),
    ([1, 2.0], "must be a sequence of block numbers"),
    (torch.ones(1), "must be a sequence of block numbers"),
    (torch.ones(1, dtype=torch.int64, device="meta"), "must be a sequence of block numbers"),
    (np.array([True]), "must be a sequence of block numbers"),
    ([[1], [2, 3]], "must be a sequence of block numbers"),
    ([None], "must be a sequence of block numbers"),
    ("12", "must be a sequence of block numbers"),
    ({1, 2}, "must be a sequence of block numbers"),
    (3, "must be a sequence of block numbers"),
    (None, "must be a sequence of block numbers"),
]


@pytest.mark.parametrize("cross", [False, True], ids=["decoder", "cross"])
@pytest.mark.parametrize(("wrong", "said"), NOT_OF_THE_POOL, ids=lambda value: repr(value)[:40])
def test_a_number_that_is_no_block_of_the_pool_is_refused_in_every_group(wrong, said, cross):
    made = with_cross(num_blocks=8)
    made.add_request("a", [[1], [2]], encoder_len=1)
    before = state(made)
    given = [[3], wrong] if cross else [wrong, [3]]
    for call, name in ((made.add_request, "b"), (made.append_blocks, "a")):
        with pytest.raises(BatchError) as error:
            call(name, given)
        assert str(error.value).startswith(f"block_ids[{int(cross)}]=")
        assert said in str(error.value)
        assert state(made) == before
    made.append_blocks("a", [[np.int32(7)], range(2)])
    assert made._requests.tables[0, 0, :2].tolist() == [1, 7]
    assert made._requests.tables[1, 0, :3].tolist() == [2, 0, 1]


def test_one_request_too_many_is_refused():
    made = builder(max_num_seqs=1)
    made.add_request("a", [[1]])
    with pytest.raises(BatchError, match="num_reqs=2 must not pass max_num_seqs=1"):
        made.add_request("b", [[2]])


def test_encoder_tokens_need_cross_groups():
    with pytest.raises(BatchError, match="encoder_len=3 needs a builder with cross_groups"):
        builder().add_request("a", [[1]], encoder_len=3)


def test_encoder_tokens_need_pages():
    made = with_cross()
    made.add_request("a", [[1], [2]], encoder_len=3)
    before = state(made)
    with pytest.raises(BatchError, match=r"encoder_len=3 of request a is past the 2 tokens .* in KV group 1"):
        made.step()
    assert state(made) == before


def test_a_step_is_finished_once():
    made = builder()
    made.add_request("a", [[1]])
    with pytest.raises(BatchError, match="step=None is required before finish_step, once for each"):
        made.finish_step()
    made.step()
    made.finish_step()
    with pytest.raises(BatchError, match="step=None is required before finish_step"):
        made.finish_step()
    assert made.num_computed_tokens_cpu.tolist() == [1]


def test_pages_may_come_as_arrays():
    made = builder(block_sizes=[4, 4])
    made.add_request("a", np.array([[1, 2], [3, 4]]))
    made.append_blocks("a", torch.tensor([[5], [6]]))
    assert made.step(9).slot_mappings[:, -1].tolist() == [20, 24]
