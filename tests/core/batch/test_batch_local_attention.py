"""Chunked local attention is causal attention over the pieces of each request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from batch_strategies import Lengths, common_of, lengths, on_meta, starts_of, unmodified
from hypothesis import given
from hypothesis import strategies as st
from paged_keys import PagedKeys

from attnplug.core.batch import make_local_attention_virtual_batches
from attnplug.core.errors import BatchError

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(lambda drawn: (drawn[0] * drawn[1], drawn[1]))
"""A chunk and a block size that divides it."""


@given(lengths(), SIZES)
def test_pieces_attended_causally_equal_chunked_attention(drawn: Lengths, sizes: tuple[int, int]) -> None:
    chunk, block = sizes
    keys = PagedKeys.of(*drawn, block)
    with unmodified(keys.common):
        pieces, _ = make_local_attention_virtual_batches(chunk, keys.common, block)
    torch.testing.assert_close(keys.attend(pieces), keys.attend(chunk_size=chunk), rtol=0, atol=1e-12)


@given(lengths(), SIZES)
def test_a_piece_stays_within_one_chunk_and_one_table_row(drawn: Lengths, sizes: tuple[int, int]) -> None:
    chunk, block = sizes
    common = common_of(*drawn)
    pieces, _ = make_local_attention_virtual_batches(chunk, common, block)
    assert pieces.num_reqs == len(pieces.seq_lens) == len(pieces.block_table_tensor)
    assert pieces.block_table_tensor.shape[1] == chunk // block
    assert (
        pieces.block_table_tensor.dtype
        == pieces.query_start_loc.dtype
        == pieces.seq_lens.dtype
        == torch.int32
    )
    assert pieces.max_seq_len == pieces.seq_lens.max() <= chunk
    assert pieces.max_query_len == pieces.query_start_loc.diff().max() <= chunk
    assert type(pieces.max_seq_len) is type(pieces.max_query_len) is int
    assert pieces._num_computed_tokens_cpu is not None
    assert torch.equal(pieces.compute_num_computed_tokens(), pieces._num_computed_tokens_cpu)
    assert (pieces._num_computed_tokens_cpu >= 0).all()
    assert pieces.seq_lens_host is not None
    assert pieces.seq_lens_host.tolist() == pieces.seq_lens.tolist()
    assert pieces.num_actual_tokens == common.num_actual_tokens == pieces.query_start_loc[-1]
    assert pieces.slot_mapping is common.slot_mapping


@given(lengths(), SIZES, st.integers(0, 3))
def test_another_table_is_mapped_as_the_batch_s_own(
    drawn: Lengths, sizes: tuple[int, int], narrower: int
) -> None:
    chunk, block = sizes
    common = common_of(*drawn)
    pieces, make_block_table = make_local_attention_virtual_batches(chunk, common, block)
    assert torch.equal(make_block_table(common.block_table_tensor + 1000), pieces.block_table_tensor + 1000)
    strided = common.block_table_tensor.repeat_interleave(2, dim=1)[:, ::2]
    assert torch.equal(make_block_table(strided), pieces.block_table_tensor)
    # Columns past a table's width repeat its last.
    width = max(common.block_table_tensor.shape[1] - narrower, 1)
    narrow = common.block_table_tensor[:, :width]
    last = narrow[:, -1:].expand(-1, common.block_table_tensor.shape[1])
    padded = torch.cat([narrow, last], dim=1)
    assert torch.equal(make_block_table(narrow), make_block_table(padded))


def test_the_worked_example() -> None:
    table = torch.arange(30, dtype=torch.int32).view(3, 10)
    common = common_of([4, 10, 5], [6, 17, 9], block_table_tensor=table)
    pieces, _ = make_local_attention_virtual_batches(4, common, 2)
    assert pieces.query_start_loc.diff().tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert pieces.seq_lens.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    assert pieces.block_table_tensor[2].tolist() == [12, 13]


@pytest.mark.parametrize(
    ("query_len", "seq_len", "keys"),
    [(0, 0, 0), (0, 3, 3), (0, 8, 4), (0, 9, 1), (1, 1, 1), (1, 8, 4), (1, 9, 1)],
)
def test_a_request_within_one_chunk_stays_one_piece(query_len: int, seq_len: int, keys: int) -> None:
    for others in ([], [(7, 20)]):  # alone, and beside one that is cut
        requests = [(query_len, seq_len), *others]
        common = common_of([query for query, _ in requests], [length for _, length in requests])
        pieces, _ = make_local_attention_virtual_batches(4, common, 2)
        assert pieces.query_start_loc[:2].tolist() == [0, query_len]
        assert pieces.seq_lens[0] == keys


@pytest.mark.parametrize("query_len", [1, 3, 9])
def test_queries_of_a_request_of_length_0_are_one_piece_without_keys(query_len: int) -> None:
    for others in ([], [(7, 20)]):  # alone, and beside one that is cut
        requests = [*others, (query_len, 0), (1, 9), *others]
        common = common_of([query for query, _ in requests], [length for _, length in requests])
        pieces, _ = make_local_attention_virtual_batches(4, common, 2)
        spans = list(zip(pieces.query_start_loc.diff().tolist(), pieces.seq_lens.tolist(), strict=True))
        cut = [(3, 4), (4, 4)] * len(others)
        assert spans == [*cut, (query_len, 0), (1, 1), *cut]


def test_a_thousand_requests_are_cut_as_one_by_one() -> None:
    random = np.random.default_rng(1)
    query_lens = random.integers(0, 40, 1024)
    seq_lens = query_lens + random.integers(0, 40, 1024)
    pieces, _ = make_local_attention_virtual_batches(8, common_of(query_lens.tolist(), seq_lens.tolist()), 4)
    one_by_one = [
        make_local_attention_virtual_batches(8, common_of([query], [length]), 4)[0]
        for query, length in zip(query_lens.tolist(), seq_lens.tolist(), strict=True)
    ]
    assert pieces.seq_lens.tolist() == torch.cat([piece.seq_lens for piece in one_by_one]).tolist()
    spans = torch.cat([piece.query_start_loc.diff() for piece in one_by_one])
    assert pieces.query_start_loc.diff().tolist() == spans.tolist()


@given(lengths())
def test_nothing_waits_for_the_device(drawn: Lengths) -> None:
    common = common_of(*drawn)
    expected, _ = make_local_attention_virtual_batches(6, common, 2)
    pieces, make_block_table = make_local_attention_virtual_batches(6, on_meta(common), 2)
    assert pieces.query_start_loc.device.type == pieces.seq_lens.device.type == "meta"
    assert torch.equal(pieces.query_start_loc_cpu, expected.query_start_loc_cpu)
    assert pieces.block_table_tensor.shape == expected.block_table_tensor.shape
    # On the host, the same indices as a device is given.
    table = common.block_table_tensor
    rows, first_pages = make_block_table._indices(torch.device("cpu"))  # type: ignore[attr-defined]
    columns = (first_pages[:, None] + torch.arange(3)).clamp_(max=table.shape[1] - 1)
    assert torch.equal(table[rows[:, None], columns], expected.block_table_tensor)


def test_an_empty_batch_has_no_pieces() -> None:
    pieces, _ = make_local_attention_virtual_batches(4, common_of([]), 2)
    assert (pieces.num_reqs, pieces.max_query_len, pieces.max_seq_len) == (0, 0, 0)
    assert pieces.block_table_tensor.shape == (0, 2)


def test_a_batch_of_one_piece_each_shares_no_memory_with_its_pieces() -> None:
    common = common_of([1, 1], [3, 6])
    pieces, _ = make_local_attention_virtual_batches(4, common, 2)
    with unmodified(common):
        for tensor in (pieces.query_start_loc, pieces.seq_lens, pieces.block_table_tensor):
            tensor += 1


def test_wanted_logits_stay_with_the_tokens() -> None:
    indices = torch.tensor([1, 5])
    common = common_of([3, 3], [9, 9], logits_indices_padded=indices, num_logits_indices=2)
    pieces, _ = make_local_attention_virtual_batches(4, common, 2)
    assert pieces.logits_indices_padded is indices
    assert pieces.num_logits_indices == 2


@pytest.mark.parametrize(
    ("chunk", "block", "message"),
    [
        (6, 4, "attn_chunk_size=6 must be a multiple of block_size=4"),
        (0, 4, "attn_chunk_size=0 must be an integer of at least 1"),
        (4, 0, "block_size=0 must be an integer of at least 1"),
        (4.0, 2, "attn_chunk_size=4.0 must be an integer"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(chunk: Any, block: int, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        make_local_attention_virtual_batches(chunk, common_of([1], [9]), block)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block_table_tensor": torch.zeros(3, 4)},
            r"block_table=\(3, 4\) must be of shape \(2, max_blocks\)",
        ),
        ({"block_table_tensor": torch.zeros(2)}, r"block_table=\(2,\) must be of shape"),
        ({"block_table_tensor": torch.zeros(2, 0)}, r"block_table=\(2, 0\) must be of shape"),
        ({"seq_lens": torch.tensor([9, 2])}, "seq_lens=2 of request 1 must be at least its query length 3"),
        ({"seq_lens": torch.tensor([9])}, r"seq_lens=\(1,\) must be of shape \(2,\)"),
        ({"query_start_loc_cpu": starts_of([3, -1])}, "query_start_loc_cpu=-1 is the length of request 1"),
        ({"key_start_loc": starts_of([9, 9])}, "key_start_loc='given' must be None: pieces find their keys"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        make_local_attention_virtual_batches(4, common_of([3, 3], [9, 9], **changes), 2)
