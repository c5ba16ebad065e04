"""How a composite builds a step, and which steps it captures: with which member, lengths, thresholds and tables."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from composite_parts import (
    MIXED,
    ONE,
    TWO,
    CapturesNothing,
    DecodesFirst,
    NeedsLengths,
    TakesAnyOrder,
    builder,
    member,
)
from sample_batches import KV_SPEC, batch

from attnplug.core import AttentionCGSupport, CrossAttentionSpec, Phase
from attnplug.core.errors import BatchError


def test_each_half_is_built_by_its_own_builder():
    made = builder().build(7, batch(*MIXED), True)
    assert (made.num_decodes, made.num_decode_tokens) == (2, 2)
    assert (made.decode.common.num_reqs, made.prefill.common.num_reqs) == (2, 2)
    assert {(half.prefix, half.fast) for half in (made.decode, made.prefill)} == {(7, True)}
    assert made.slot_mapping.tolist() == list(range(4, 12))


@pytest.mark.parametrize(("lengths", "absent"), [(([1, 1], [3, 4]), "prefill"), (([3, 1], [3, 4]), "decode")])
def test_a_half_without_requests_is_not_built(lengths, absent):
    made = builder().build(0, batch(*lengths))
    assert getattr(made, absent) is None


def test_requests_without_new_tokens_are_nobodys_work():
    made = builder().build(0, batch([0, 0, 5], [3, 0, 9]))
    assert made.decode is None
    assert made.prefill.common.num_reqs == 1


def test_drafts_are_built_as_the_members_build_them():
    made = builder().build_for_drafting(batch(*MIXED), 3)
    assert (made.decode.way, made.prefill.way) == (3, 3)


def test_tables_of_another_group_are_cut_in_the_same_place():
    one = builder()
    table, slots = torch.arange(12, dtype=torch.int32).view(4, 3), torch.arange(100, 110)
    made = one.update_block_table(one.build(0, batch(*MIXED)), table, slots)
    assert made.slot_mapping.tolist() == list(range(100, 108))
    assert torch.equal(made.decode.updated[0], table[:2])
    assert torch.equal(made.prefill.updated[0], table[2:])
    assert made.decode.updated[1].tolist() == [100, 101]
    assert made.prefill.updated[1].tolist()[:6] == list(range(102, 108))


def test_a_half_that_is_not_there_is_not_updated():
    one = builder()
    table, slots = torch.zeros(2, 3, dtype=torch.int32), torch.arange(2)
    made = one.update_block_table(one.build(0, batch([1, 1], [3, 4])), table, slots)
    assert made.prefill is None
    assert made.decode.updated[1] is slots


def test_tables_are_updated_only_where_both_members_can():
    one = builder(member("A", NeedsLengths), TWO)
    assert not one.supports_update_block_table
    with pytest.raises(TypeError, match="cannot swap block tables"):
        one.update_block_table(one.build(0, batch(*MIXED)), torch.zeros(4, 3), torch.arange(8))


@pytest.mark.parametrize("lengths", [([1, 1], [3, 4]), ([3, 3], [3, 4])])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_one_member_cannot_update_is_not_updated_in_steps_of_the_other_either(lengths, is_first):
    pair = member("A", CannotUpdate), TWO
    one = builder(*(pair if is_first else reversed(pair)))
    assert not one.supports_update_block_table
    with pytest.raises(TypeError, match="CompositeMetadataBuilder cannot swap block tables"):
        one.update_block_table(one.build(0, batch(*lengths)), torch.zeros(2, 3), torch.arange(6))


def test_it_needs_what_the_more_demanding_member_needs():
    assert builder(member("A", NeedsLengths), TWO).needs_host_seq_lens == "exact"
    assert builder().needs_host_seq_lens == "none"


def test_cross_layers_keep_all_slots_when_tables_are_updated():
    spec = CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    one = builder(spec=spec)
    made = one.build(0, dataclasses.replace(batch(*MIXED), slot_mapping=torch.arange(33)))
    assert made.slot_mapping.shape == (33,)
    slots = torch.arange(50, 83)
    made = one.update_block_table(made, torch.zeros(4, 3, dtype=torch.int32), slots)
    assert made.slot_mapping is made.decode.updated[1] is made.prefill.updated[1] is slots


class CannotUpdate(DecodesFirst):
    supports_update_block_table = False


@pytest.mark.parametrize(
    ("needs", "stricter"), [(("none", "upper_bound"), "upper_bound"), (("upper_bound", "exact"), "exact")]
)
def test_the_most_precise_lengths_that_a_member_needs_count(needs, stricter):
    kinds = [type("Needs", (DecodesFirst,), {"needs_host_seq_lens": each}) for each in needs]
    for order in (kinds, kinds[::-1]):
        assert builder(*(member("M", each) for each in order)).needs_host_seq_lens == stricter


class Keyed(DecodesFirst):
    key = 1

    @property
    def build_key(self):
        return self.key


def test_builds_are_shared_where_both_members_say_so_and_the_step_is_cut_alike():
    keyed = member("A", Keyed), member("B", Keyed, number=2.0)
    assert builder(*keyed).build_key == builder(*keyed).build_key == (1, 1, 1)
    assert builder(*keyed, num_speculative_tokens=3).build_key == (1, 1, 4)
    other = builder(*keyed)
    other.prefill.key = 5
    assert other.build_key == (1, 5, 1)
    assert builder(keyed[0], TWO).build_key is builder(ONE, keyed[1]).build_key is None


# Graphs


def test_a_builder_that_takes_any_order_decodes_single_tokens_and_what_is_verified_at_once():
    assert builder(decode=member("B", TakesAnyOrder)).reorder_batch_threshold == 1
    assert builder(decode=member("B", TakesAnyOrder), num_speculative_tokens=3).reorder_batch_threshold == 4


def test_what_is_captured_at_once_is_decoded_at_once():
    assert builder(num_speculative_tokens=2).reorder_batch_threshold == 3
    assert builder(decode=member("B", CapturesNothing), num_speculative_tokens=2).reorder_batch_threshold == 1


def test_a_member_that_only_decodes_keeps_its_own_threshold():
    decodes = member("B", TakesAnyOrder, supported_phases=(Phase.DECODE,))
    assert builder(decode=decodes, num_speculative_tokens=2).reorder_batch_threshold == 1


@pytest.mark.parametrize("own", [None, 1, 2, 5])
@pytest.mark.parametrize("level", list(AttentionCGSupport), ids=lambda level: level.name)
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_threshold_is_the_decoding_members_or_long_enough_to_verify_drafts(own, level, drafts):
    parts = {"reorder_batch_threshold": own, "cudagraph_support": level}
    one = builder(decode=member("B", type("Sorts", (DecodesFirst,), parts)), num_speculative_tokens=drafts)
    at_once = own is None or level >= AttentionCGSupport.UNIFORM_BATCH
    assert one.reorder_batch_threshold == max(own or 1, 1 + drafts if at_once else 1)
    assert one.get_cudagraph_support(one.config, KV_SPEC) is min(level, AttentionCGSupport.UNIFORM_BATCH)
    assert one.cudagraph_support is min(level, AttentionCGSupport.UNIFORM_BATCH)


@pytest.mark.parametrize("level", list(AttentionCGSupport), ids=lambda level: level.name)
def test_the_prefilling_members_level_counts_for_prefills_alone(level):
    captures = member("A", type("Captures", (DecodesFirst,), {"cudagraph_support": level}))
    one = builder(captures, TWO)
    assert one.get_cudagraph_support(one.config, KV_SPEC) is AttentionCGSupport.UNIFORM_BATCH
    assert one.build_for_cudagraph_capture(batch([1, 1], [9, 9])).prefill is None
    if level >= AttentionCGSupport.UNIFORM_BATCH:
        assert one.build_for_cudagraph_capture(batch([3, 3], [9, 9])).prefill.way == "capture"
    else:
        with pytest.raises(BatchError, match=f"A captures {level.name}"):
            one.build_for_cudagraph_capture(batch([3, 3], [9, 9]))


def test_where_a_mixed_step_is_cut_is_not_in_the_graph():
    one = builder()
    assert one.get_cudagraph_support(one.config, KV_SPEC) is AttentionCGSupport.UNIFORM_BATCH
    assert one.cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    never = builder(decode=member("B", CapturesNothing))
    assert never.get_cudagraph_support(never.config, KV_SPEC) is AttentionCGSupport.NEVER


def test_decodes_are_captured_by_the_decoding_member_alone():
    made = builder(member("A", CapturesNothing), TWO).build_for_cudagraph_capture(batch([1, 1], [9, 9]))
    assert made.decode.way == "capture"
    assert made.prefill is None


def test_longer_queries_are_captured_by_the_other_where_it_can():
    made = builder().build_for_cudagraph_capture(batch([3, 3], [9, 9]))
    assert made.decode is None
    assert made.prefill.way == "capture"
    one = builder(member("A", CapturesNothing), TWO)
    limit = "max_query_len=3 is past the 1 of a decode on TWO, and A captures NEVER"
    with pytest.raises(BatchError, match=limit):
        one.build_for_cudagraph_capture(batch([3, 3], [9, 9]))


def test_a_mixed_step_is_not_captured():
    with pytest.raises(BatchError, match="max_query_len=5 is past the 1 of a decode on TWO"):
        builder().build_for_cudagraph_capture(batch(*MIXED))
