"""The zig-zag split of new tokens: each row is on one rank, ranks have equal work, and a piece has the keys before it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug.core import ContextParallel
from attnplug.core.metadata import CommonAttentionMetadata
from attnplug.runtime.batch.sharded_step import SplitQueries, most_rows, pays_to_split


def step(lens: list[int]) -> CommonAttentionMetadata:
    starts = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        num_reqs=len(lens),
        num_actual_tokens=sum(lens),
        max_query_len=max(lens),
        max_seq_len=max(lens),
        block_table_tensor=torch.zeros(len(lens), 4, dtype=torch.int32),
        slot_mapping=torch.arange(sum(lens)),
    )


def splits(lens: list[int], size: int) -> list[SplitQueries]:
    return [SplitQueries.of(step(lens), ContextParallel(size, rank)) for rank in range(size)]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 5))
def test_each_row_is_on_one_rank_and_sees_the_keys_before_it(lens: list[int], size: int) -> None:
    seen: list[int] = []
    found = splits(lens, size)
    first_of = np.repeat(np.cumsum([0, *lens])[:-1], lens)
    for split in found:
        rows, pieces = split.rows.tolist(), split.pieces
        seen += rows
        starts, keys = pieces.query_start_loc_cpu.tolist(), pieces.key_start_loc_cpu
        assert keys is not None
        assert pieces.num_actual_tokens == len(rows) <= split.most_rows
        for piece in range(pieces.num_reqs):
            own = rows[starts[piece] : starts[piece + 1]]
            # The last row sees all keys of its piece: those of its request up to its own.
            expected = list(range(first_of[own[-1]], own[-1] + 1))
            assert split.key_rows[keys[piece] : keys[piece + 1]].tolist() == expected
            assert pieces.seq_lens[piece] == len(expected)
            assert own == expected[len(expected) - len(own) :]
    assert sorted(seen) == list(range(sum(lens)))
    most = found[0].most_rows
    assert {split.most_rows for split in found} == {most}
    assert most <= most_rows(sum(lens), len(lens), size)
    gathered = torch.full((size * most,), -1)
    for rank, split in enumerate(found):
        gathered[rank * most : rank * most + len(split.rows)] = split.rows
        assert torch.equal(split.gathered, found[0].gathered)
    assert gathered[found[0].gathered].tolist() == list(range(sum(lens)))


def test_ranks_have_equal_work() -> None:
    for size in (2, 3, 8):
        found = splits([2400, 1200], size)
        # A row's work is the number of keys that it sees.
        work = [sum(row - (0 if row < 2400 else 2400) + 1 for row in split.rows.tolist()) for split in found]
        assert max(work) <= 1.01 * min(work)
        assert {split.key_rows.numel() for split in found} == {3600 * (2 * size + 1) // (2 * size)}


def test_only_long_steps_are_split() -> None:
    gpu = torch.device("cuda")
    assert pays_to_split(np.array([1024]), gpu)
    assert not pays_to_split(np.array([1023]), gpu)
    assert not pays_to_split(np.full(512, 4), gpu)
    assert pays_to_split(np.full(16, 256), gpu)
