"""A step on two backends: where it is cut, who builds what, who writes, and who attends which rows."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from composite_parts import MIXED, ONE, SPEC, TWO, DecodesFirst, RecordingImpl, builder, member, rows
from hypothesis import given
from hypothesis import strategies as st
from sample_batches import batch

from attnplug.core import (
    Phase,
    composite_backend,
)
from attnplug.core.batch import UBatchSlice, split_attn_metadata
from attnplug.core.composite.routing import Router
from attnplug.core.errors import BatchError


@pytest.fixture
def calls():
    RecordingImpl.calls.clear()
    return RecordingImpl.calls


# Where it is cut


def split_step(common, threshold, is_cross):
    """The parts of a step for two members without routes."""
    return Router(()).split(common, threshold, is_cross)


steps = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=6)


@given(steps, st.integers(1, 4), st.booleans())
def test_halves_are_what_micro_batches_of_the_same_requests_are(lengths, threshold, known):
    new = [count for count, _ in lengths]
    tokens = [a + b for a, b in lengths]
    host = np.array(tokens, dtype=np.int32) if known else None
    common = batch(new, tokens, seq_lens_host=host, seq_lens_host_exact=known)
    cut = split_step(common, threshold, False)
    first = next((i for i, count in enumerate(new) if count > threshold), len(new))
    assert cut.num_reqs == first
    assert cut.num_tokens == sum(new[:first])
    for half, (begin, end) in ((cut.decode, (0, first)), (cut.prefill, (first, len(new)))):
        span = sum(new[:begin]), sum(new[:end])
        if begin == end or (span[0] == span[1] and end < len(new)):
            assert half is None
            continue
        if (begin, end) == (0, len(new)):
            assert half is common
            continue
        (expected,) = split_attn_metadata([UBatchSlice(slice(begin, end), slice(*span))], common)
        for field in (
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "block_table_tensor",
            "slot_mapping",
        ):
            assert torch.equal(getattr(half, field), getattr(expected, field)), field
        for field in ("num_reqs", "num_actual_tokens", "causal"):
            assert getattr(half, field) == getattr(expected, field), field
        assert half.max_query_len >= expected.max_query_len
        assert half.max_query_len <= (threshold if half is cut.decode else max(new))
        assert half.max_seq_len >= max(tokens[begin:end])
        if known:
            assert np.array_equal(half.seq_lens_host, host[begin:end])
            assert half.seq_lens_host_exact


def test_nothing_but_start_locations_is_copied():
    common = batch(*MIXED)
    cut = split_step(common, 1, False)
    for field in ("seq_lens", "block_table_tensor", "slot_mapping"):
        whole = getattr(common, field)
        for half in (cut.decode, cut.prefill):
            assert getattr(half, field).untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert cut.decode.query_start_loc.data_ptr() == common.query_start_loc.data_ptr()


def test_padding_tokens_go_with_the_last_requests():
    common = dataclasses.replace(batch(*MIXED), num_actual_tokens=10, slot_mapping=torch.arange(10))
    assert split_step(common, 1, False).prefill.num_actual_tokens == 8
    decodes = dataclasses.replace(batch([1, 1], [2, 2]), num_actual_tokens=4, slot_mapping=torch.arange(4))
    assert split_step(decodes, 1, False).decode is decodes


def test_cross_layers_have_all_slots_in_both_halves():
    common = dataclasses.replace(batch(*MIXED), slot_mapping=torch.arange(33))
    cut = split_step(common, 1, True)
    assert cut.decode.slot_mapping is cut.prefill.slot_mapping is common.slot_mapping


def test_lengths_per_rank_are_cut_too():
    common = dataclasses.replace(batch(*MIXED), dcp_local_seq_lens=torch.tensor([5, 2, 4, 1]))
    cut = split_step(common, 1, False)
    assert cut.decode.dcp_local_seq_lens.tolist() == [5, 2]
    assert cut.prefill.dcp_local_seq_lens.tolist() == [4, 1]


# What builders see of the model


def test_each_builder_sees_layers_with_its_own_impl():
    composite = composite_backend(ONE, TWO)
    impl = composite.get_impl_cls().from_spec(SPEC, backend=composite, layer_name="layers.0")
    layers = {"layers.0": SimpleNamespace(impl=impl, _k_scale=3), "other": SimpleNamespace(impl="else's")}
    one = builder(layers=layers.items())
    for phase, each in ((Phase.PREFILL, one.prefill), (Phase.DECODE, one.decode)):
        seen = each.config.layers
        assert list(seen) == ["layers.0", "other"]
        assert len(seen) == 2
        assert seen["layers.0"].impl is impl.members[phase]
        assert seen["layers.0"]._k_scale == 3
        assert seen["other"].impl == "else's"


class HasWorkspace(DecodesFirst):
    workspace_bytes = 4

    def get_workspace_buffer(self):
        if not hasattr(self, "buffer"):
            self.buffer = torch.zeros(1)
        return self.buffer

    def set_workspace_buffer(self, buffer):
        self.buffer = buffer


def test_members_with_scratch_share_it_with_all_others():
    one = builder(member("A", HasWorkspace), member("B", HasWorkspace))
    assert one.get_workspace_buffer() is one.decode.buffer is one.prefill.buffer
    given_buffer = torch.zeros(2)
    one.set_workspace_buffer(given_buffer)
    assert one.decode.buffer is one.prefill.buffer is given_buffer
    assert not hasattr(builder(), "get_workspace_buffer")
    alone = builder(member("A", HasWorkspace), TWO)
    assert alone.get_workspace_buffer() is alone.prefill.buffer
    unlike = builder(member("A", HasWorkspace), member("B", HasWorkspace))
    unlike.prefill.workspace_bytes = 8
    unlike.prefill.buffer = torch.zeros(2)
    assert unlike.workspace_bytes == 8
    assert unlike.get_workspace_buffer() is unlike.decode.buffer is unlike.prefill.buffer


# Running


def run(calls, lengths, *, spec=SPEC, prefill=ONE, decode=TWO, key=True, **options):
    composite = composite_backend(prefill, decode)
    impl = composite.get_impl_cls().from_spec(spec, backend=composite, layer_name="l")
    common = batch(*lengths)
    metadata = builder(prefill, decode).build(0, common)
    tokens = common.num_actual_tokens + 2
    output = torch.full((tokens, 2, 8), torch.nan)
    keys = rows(tokens, 1) if key else None
    returned = impl.forward(None, rows(tokens), keys, keys, torch.zeros(1), metadata, output, **options)
    assert returned is output
    return output[:, 0, 0].tolist()


def test_the_decoding_member_writes_all_and_each_attends_its_own_rows(calls):
    assert run(calls, ([1, 1, 3], [9, 3, 8])) == [2, 2, 1, 1, 1, 1, 1]
    write, decode, prefill = calls
    assert write == (2.0, "write", 7, [4, 5, 6, 7, 8])
    assert decode[:4] == (2.0, "attend", [0, 1], None)
    assert prefill[:4] == (1.0, "attend", [2, 3, 4, 5, 6], [2, 3, 4, 5, 6])


@pytest.mark.parametrize(("lengths", "number"), [(([1, 1], [9, 3]), 2.0), (([3, 3], [9, 3]), 1.0)])
def test_a_step_of_one_kind_is_one_members_affair(calls, lengths, number):
    run(calls, lengths)
    assert [call[:2] for call in calls] == [(2.0, "write"), (number, "attend")]


def test_lse_and_sinks_go_to_both(calls):
    lse = torch.full((7, 2), torch.nan)
    spec = SPEC.replace(needs_lse=True)
    run(calls, ([1, 1, 3], [9, 3, 8]), spec=spec, output_lse=lse, use_sinks=False)
    assert lse[:, 0].tolist() == [-2, -2, -1, -1, -1, -1, -1]
    assert [call[4] for call in calls[1:]] == [{"use_sinks": False}] * 2


def test_cross_layers_attend_pages_in_both_halves(calls):
    spec = SPEC.replace(attn_type="encoder_decoder")
    run(calls, ([1, 1, 3], [9, 3, 8]), spec=spec)
    assert [call[3] for call in calls[1:]] == [None, None]


def test_without_new_keys_nothing_is_written(calls):
    run(calls, ([1, 1, 3], [9, 3, 8]), key=False)
    assert [call[1] for call in calls] == ["attend", "attend"]


@pytest.mark.parametrize("field", ["output_scale", "output_block_scale"])
def test_output_scales_are_refused(calls, field):
    with pytest.raises(BatchError, match=field):
        run(calls, ([1, 3], [9, 8]), **{field: torch.ones(1)})


@pytest.mark.parametrize("field", ["query", "output"])
def test_fewer_rows_than_decodes_are_refused_like_fewer_than_tokens(field):
    composite = composite_backend(ONE, TWO)
    impl = composite.get_impl_cls().from_spec(SPEC, backend=composite, layer_name="l")
    metadata = builder().build(0, batch([1, 1, 3], [9, 3, 8]))
    given = {"query": rows(5), "output": rows(5)} | {field: rows(1)}
    with pytest.raises(BatchError, match=rf"{field}\.shape\[0\]=1.*5 tokens"):
        impl.attend(None, given["query"], None, None, torch.zeros(1), metadata, given["output"])


def test_what_an_impl_can_is_what_its_members_can():
    made = composite_backend(ONE, TWO).get_impl_cls()
    assert made.can_return_lse_for_decode
    assert not composite_backend(TWO, ONE).get_impl_cls().can_return_lse_for_decode
    assert not made.supports_quant_query_input


def test_both_members_hear_that_weights_are_loaded():
    composite = composite_backend(ONE, TWO)
    impl = composite.get_impl_cls().from_spec(SPEC, backend=composite, layer_name="l")
    heard = []
    for each in impl.members.values():
        each.process_weights_after_loading = heard.append
    impl.process_weights_after_loading(torch.float32)
    assert heard == [torch.float32] * 2


# A prefix that several requests share


@pytest.mark.parametrize(
    ("lens", "wants", "asked", "prefixes"),
    [
        ([1, 1, 5, 6], {"ONE", "TWO"}, {"TWO": [1, 1], "ONE": [5, 6]}, (8, 8)),
        ([1, 1, 5, 6], {"TWO"}, {"TWO": [1, 1], "ONE": [5, 6]}, (8, 0)),
        # One request shares its prefix with no other, and is not asked about.
        ([1, 5, 6], {"ONE", "TWO"}, {"ONE": [5, 6]}, (0, 8)),
        ([1, 1, 1], {"TWO"}, {"TWO": [1, 1, 1]}, (8, None)),
        ([1, 1, 5], set(), {"TWO": [1, 1]}, (0, 0)),
    ],
)
def test_a_prefix_is_for_the_member_that_wants_it_for_its_part(lens, wants, asked, prefixes):
    heard = {}

    def wanting(name):
        def wanted(
            self,
            common_prefix_len,
            query_lens,
            num_query_heads,
            num_kv_heads,
            use_alibi,
            use_sliding_window,
            use_local_attention,
            num_sms,
            dcp_world_size,
        ):
            assert (common_prefix_len, num_query_heads, num_sms, dcp_world_size) == (8, 2, 4, 1)
            heard[name] = query_lens.tolist()
            return name in wants

        return type(f"Wanting{name}", (DecodesFirst,), {"use_cascade_attention": wanted})

    made = builder(member("ONE", wanting("ONE")), member("TWO", wanting("TWO"), 2.0))
    assert made.use_cascade_attention(8, np.array(lens, np.int32), 2, 1, False, False, False, 4, 1) is bool(
        wants
    )
    assert heard == asked
    built = made.build(8, batch(lens, [9 + each for each in lens]))
    decode, prefill = prefixes
    assert built.decode.prefix == decode
    assert (None if built.prefill is None else built.prefill.prefix) == prefill


def test_a_step_has_a_key_only_if_both_members_have_one():
    keyed = type("Keyed", (DecodesFirst,), {"build_key": property(lambda self: "key")})
    assert builder().build_key is None
    assert builder(member("ONE", keyed), TWO).build_key is None
    assert builder(member("ONE", keyed), member("TWO", keyed)).build_key == ("key", "key", 1)
