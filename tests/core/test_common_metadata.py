"""CommonAttentionMetadata: one step's batch, and views of it."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_batches import batch

from attnplug.core import PAD_SLOT_ID, CommonAttentionMetadata
from attnplug.errors import BatchError

STALLS = "can stall the device"
BY_REQUEST = ["seq_lens", "block_table_tensor"]
BY_START = ["query_start_loc", "query_start_loc_cpu"]
OPTIONAL_TENSORS = [
    "encoder_seq_lens",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu",
    "_seq_lens_cpu",
    "_num_computed_tokens_cpu",
]
OPTIONAL_STARTS = ["key_start_loc", "key_start_loc_cpu"]
OPTIONAL_ARRAYS = ["encoder_seq_lens_cpu", "seq_lens_host"]

lengths = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 20)), min_size=1, max_size=6)


def padded() -> CommonAttentionMetadata:
    """Three requests and six tokens, of which the last request and two tokens are graph padding."""
    extra = {name: torch.tensor([7, 8, 9], dtype=torch.int32) for name in OPTIONAL_TENSORS}
    extra |= {name: torch.tensor([0, 5, 9, 9], dtype=torch.int32) for name in OPTIONAL_STARTS}
    arrays = {name: np.array([7, 8, 9], dtype=np.int32) for name in OPTIONAL_ARRAYS}
    return batch([3, 1, 2], [7, 8, 9], **extra, **arrays)


def test_padding_is_not_written() -> None:
    assert PAD_SLOT_ID == -1


def test_a_batch_leaves_causality_to_the_layers_and_knows_its_lengths_exactly_by_default() -> None:
    common = batch([1], [5])
    assert (common.causal, common.seq_lens_host, common.seq_lens_host_exact) == (None, None, True)


class TestUnpadded:
    def test_it_counts_requests_and_tokens(self) -> None:
        view = padded().unpadded(num_actual_tokens=4, num_actual_reqs=2)
        assert (view.num_reqs, view.num_actual_tokens) == (2, 4)
        assert (view.max_query_len, view.max_seq_len) == (3, 9)
        assert view.query_start_loc.tolist() == [0, 3, 4]
        assert view.seq_lens.tolist() == [7, 8]
        assert view.slot_mapping.tolist() == [4, 5, 6, 7]
        assert view.block_table_tensor.tolist() == [[0, 1, 2], [3, 4, 5]]

    @pytest.mark.parametrize("name", BY_REQUEST + BY_START + OPTIONAL_TENSORS + OPTIONAL_STARTS)
    def test_tensors_share_memory(self, name: str) -> None:
        common = padded()
        whole, part = getattr(common, name), getattr(common.unpadded(4, 2), name)
        assert part.shape[0] == 2 + name.endswith(("start_loc", "start_loc_cpu"))
        part[0] = 77
        assert torch.equal(whole[0], part[0])

    @pytest.mark.parametrize("name", OPTIONAL_ARRAYS)
    def test_arrays_share_memory(self, name: str) -> None:
        common = padded()
        part = getattr(common.unpadded(4, 2), name)
        assert part.shape == (2,)
        assert np.shares_memory(part, getattr(common, name))

    @pytest.mark.parametrize("name", OPTIONAL_TENSORS + OPTIONAL_STARTS + OPTIONAL_ARRAYS)
    def test_what_is_not_there_stays_none(self, name: str) -> None:
        assert getattr(batch([3, 1], [7, 8]).unpadded(3, 1), name) is None

    def test_the_batch_itself_is_left_alone(self) -> None:
        common = padded()
        before = {f.name: getattr(common, f.name) for f in dataclasses.fields(common)}
        common.unpadded(4, 2)
        for name, value in before.items():
            assert getattr(common, name) is value

    def test_other_fields_go_along(self) -> None:
        indices = torch.tensor([0, 1])
        common = dataclasses.replace(
            padded(),
            causal=False,
            logits_indices_padded=indices,
            num_logits_indices=2,
            seq_lens_host_exact=False,
        )
        view = common.unpadded(4, 2)
        assert (view.causal, view.num_logits_indices, view.seq_lens_host_exact) == (False, 2, False)
        assert view.logits_indices_padded is indices

    def test_a_kind_of_its_own_stays_one(self) -> None:
        class Mine(CommonAttentionMetadata):
            pass

        common = Mine(**{f.name: getattr(padded(), f.name) for f in dataclasses.fields(Mine) if f.init})
        assert type(common.unpadded(4, 2)) is Mine

    def test_all_of_a_batch_may_be_kept_and_none_of_it(self) -> None:
        assert padded().unpadded(6, 3).seq_lens.tolist() == [7, 8, 9]
        empty = padded().unpadded(0, 0)
        assert (empty.query_start_loc.tolist(), empty.slot_mapping.tolist()) == ([0], [])

    @pytest.mark.parametrize(
        ("tokens", "requests", "text"),
        [
            (7, 3, "num_actual_tokens=7"),
            (-1, 3, "num_actual_tokens=-1"),
            (6, 4, "num_actual_reqs=4"),
            (6, -1, "num_actual_reqs=-1"),
        ],
    )
    def test_more_than_there_is_cannot_be_kept(self, tokens: int, requests: int, text: str) -> None:
        with pytest.raises(BatchError) as caught:
            padded().unpadded(tokens, requests)
        assert text in str(caught.value)
        assert "the size of the batch" in str(caught.value)


class TestComputedTokens:
    @given(lengths)
    def test_they_are_the_lengths_less_the_new_tokens(self, pairs: list[tuple[int, int]]) -> None:
        new, computed = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        common = batch(new, [a + b for a, b in pairs])
        assert common.compute_num_computed_tokens().tolist() == computed
        assert common.compute_num_computed_tokens().dtype == torch.int32

    def test_they_are_computed_once(self) -> None:
        common = batch([3, 1], [7, 8])
        first = common.compute_num_computed_tokens()
        common.seq_lens += 1
        assert common.compute_num_computed_tokens() is first

    def test_a_batch_made_of_another_computes_its_own(self) -> None:
        common = batch([3, 1], [7, 8])
        common.compute_num_computed_tokens()
        longer = dataclasses.replace(common, seq_lens=common.seq_lens + 10)
        assert longer.compute_num_computed_tokens().tolist() == [14, 17]
        assert common.unpadded(3, 1).compute_num_computed_tokens().tolist() == [4]


class TestHostCopies:
    @pytest.mark.parametrize("name", ["seq_lens_cpu", "num_computed_tokens_cpu"])
    def test_they_warn_that_they_can_stall_the_device(self, name: str) -> None:
        with pytest.warns(DeprecationWarning, match=f"{name} can stall the device.*seq_lens_host"):
            getattr(batch([3, 1], [7, 8]), name)

    def test_they_hold_what_the_device_holds(self) -> None:
        common = batch([3, 1], [7, 8])
        with pytest.warns(DeprecationWarning, match=STALLS):
            assert common.num_computed_tokens_cpu.tolist() == [4, 7]
        with pytest.warns(DeprecationWarning, match=STALLS):
            assert common.seq_lens_cpu.tolist() == [7, 8]

    def test_they_are_copied_once(self) -> None:
        common = batch([3, 1], [7, 8])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert common.seq_lens_cpu is common.seq_lens_cpu
            assert common.num_computed_tokens_cpu is common.num_computed_tokens_cpu

    def test_a_copy_that_was_given_is_used(self) -> None:
        given_lens, given_computed = torch.tensor([70, 80]), torch.tensor([1, 2])
        common = batch([3, 1], [7, 8], _seq_lens_cpu=given_lens)
        with pytest.warns(DeprecationWarning, match=STALLS):
            assert common.num_computed_tokens_cpu.tolist() == [67, 79]
        common = batch([3, 1], [7, 8], _seq_lens_cpu=given_lens, _num_computed_tokens_cpu=given_computed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert common.seq_lens_cpu is given_lens
            assert common.num_computed_tokens_cpu is given_computed
