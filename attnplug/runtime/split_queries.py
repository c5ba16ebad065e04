"""The zig-zag split of a prefill: each rank attends two pieces of each request's new tokens, over the keys before them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.batch.host import to_device
from attnplug.core.context_parallel import ContextParallel
from attnplug.core.metadata import PAD_SLOT_ID, CommonAttentionMetadata

_Ints = npt.NDArray[np.int64]

_LEAST_PAIRS = 1 << 20
"""Pairs of a new query and a new key from which a split spares more than its copies take.

It is one request of 1,024 new tokens. With 32 heads of 128 elements its products take about 15 us on an H200, and the
copies of keys, queries and outputs about 10. It is estimated and not measured yet.
"""
_LEAST_CPU_PAIRS = 1 << 9


def pays_to_split(query_lens: npt.NDArray[Any], device: torch.device) -> bool:
    """Whether a step with these numbers of new tokens is long enough; it is the same on all ranks."""
    lens = query_lens.astype(np.int64)
    least = _LEAST_CPU_PAIRS if device.type == "cpu" else _LEAST_PAIRS
    return int((lens * lens).sum()) >= least


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SplitQueries:
    """The new tokens of a step whose rows this rank attends, over the new tokens before them.

    With N ranks the new tokens of each request are cut into 2 N pieces of nearly equal length. A rank has the pieces
    r and 2 N - 1 - r: early pieces see few keys and late ones many, so all ranks have equal work.

    Args:
        rows: int64 `[t]`, the rows of this rank.
        key_rows: int64 `[k]`, for each piece the rows of its request from the first new token to the piece's last.
        pieces: the pieces as requests with K and V in the call, packed as `rows` and `key_rows` are.
        most_rows: the most rows that a rank has.
        gathered: int64 `[T]`, the place of each row of the step among the ranks' rows, `most_rows` for each rank.
    """

    rows: torch.Tensor
    key_rows: torch.Tensor
    pieces: CommonAttentionMetadata
    most_rows: int
    gathered: torch.Tensor

    @classmethod
    def of(cls, common: CommonAttentionMetadata, place: ContextParallel) -> SplitQueries:
        """The split of a step; the host reads no value from the device."""
        device = common.query_start_loc.device
        starts = common.query_start_loc_cpu.numpy().astype(np.int64)
        by_rank = [_pieces(starts, place.size, rank) for rank in range(place.size)]
        rows = [_ranges(first + begin, end - begin) for first, begin, end in by_rank]
        most = max((each.size for each in rows), default=0)
        gathered = np.zeros(common.num_actual_tokens, dtype=np.int64)
        for rank, own in enumerate(rows):
            gathered[own] = rank * most + np.arange(own.size)
        first, begin, end = by_rank[place.rank]
        return cls(
            rows=to_device(rows[place.rank], device),
            key_rows=to_device(_ranges(first, end), device),
            pieces=_batch(common, begin, end, device),
            most_rows=most,
            gathered=to_device(gathered, device),
        )


def most_rows(tokens: int, requests: int, size: int) -> int:
    """The most rows of a rank in any step of up to `tokens` new tokens and `requests` requests."""
    return min(tokens, tokens // size + 2 * requests)


def _pieces(starts: _Ints, size: int, rank: int) -> tuple[_Ints, _Ints, _Ints]:
    """The first row of the request of each piece of a rank, and the piece's begin and end in the request."""
    lens = np.diff(starts)
    # Rounded down at every cut, so that lengths differ by at most one token.
    cuts = lens[:, None] * np.arange(2 * size + 1) // (2 * size)
    own = np.array([rank, 2 * size - 1 - rank])
    begin, end = cuts[:, own].ravel(), cuts[:, own + 1].ravel()
    kept = end > begin
    return starts[:-1].repeat(2)[kept], begin[kept], end[kept]


def _ranges(first: _Ints, counts: _Ints) -> _Ints:
    """`first[i], first[i] + 1, ...`, `counts[i]` of each, one after another."""
    before = np.cumsum(counts) - counts
    return np.repeat(first - before, counts) + np.arange(int(counts.sum()), dtype=np.int64)


def _batch(
    common: CommonAttentionMetadata, begin: _Ints, end: _Ints, device: torch.device
) -> CommonAttentionMetadata:
    lens, host = end - begin, end.astype(np.int32)
    queries, keys = (torch.from_numpy(_starts(each)) for each in (lens, end))
    tokens, reqs = int(lens.sum()), end.size
    return CommonAttentionMetadata(
        query_start_loc=to_device(queries.numpy(), device),
        query_start_loc_cpu=queries,
        seq_lens=to_device(host, device),
        num_reqs=reqs,
        num_actual_tokens=tokens,
        max_query_len=int(lens.max(initial=0)),
        max_seq_len=int(end.max(initial=0)),
        block_table_tensor=common.block_table_tensor.new_zeros(reqs, 1),
        slot_mapping=torch.full((tokens,), PAD_SLOT_ID, dtype=torch.int64, device=device),
        key_start_loc=to_device(keys.numpy(), device),
        key_start_loc_cpu=keys,
        seq_lens_host=host,
    )


def _starts(lengths: _Ints) -> npt.NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
