"""A step on the host: its decodes and other requests, and the page-table arrays for FlashInfer's plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from attnplug.core.batch.host import to_device
from attnplug.core.errors import BatchError
from attnplug.ops.gather import gather_page_indices

Ints = npt.NDArray[np.int32]


# Not frozen: that takes five times as long, and each step makes some.
@dataclasses.dataclass(slots=True, eq=False)
class Part:
    """The decodes of a step, or its other requests: n of them, each with queries and keys.

    It owns its arrays: an engine may reuse those of the batch while this part is planned again.

    Args:
        first_token: where their queries start.
        num_tokens: the number of their queries.
        max_query_len: queries of the longest.
        max_seq_len: keys of the longest.
        first_page: where their pages start in the step's indices.
        qo_indptr: int32 `[n + 1]`, where each request's queries start, from 0.
        kv_indptr: int32 `[n + 1]`, where its pages start, from 0.
        last_page_len: int32 `[n]`, keys in its last page, 1 to the page size.
        seq_lens: int32 `[n]`, its keys.
        plan_key: equal for parts with the same queries and numbers of pages.
    """

    first_token: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    first_page: int
    qo_indptr: Ints
    kv_indptr: Ints
    last_page_len: Ints
    seq_lens: Ints
    plan_key: bytes

    @property
    def num_pages(self) -> int:
        """Pages of all its requests."""
        return int(self.kv_indptr[-1])

    def same_pages(self, other: Part) -> bool:
        """Whether queries and numbers of pages are equal; the fa2 planner reads nothing else."""
        return self.max_query_len == other.max_query_len and self.plan_key == other.plan_key


@dataclasses.dataclass(slots=True, eq=False)
class HostStep:
    """The requests of a step that see anything, decodes first.

    Args:
        decode: requests of one query at the front; None without.
        prefill: all others; None without.
        kv_indptr: int32 `[n + 1]`, where each request's pages start in the step's indices.
        rows: the block-table row of each request, int32 `[n]`; None where every row is a request.
        seen: int64, the queries that see any key; None if all do. Plans leave the others out, because
            FlashInfer's result for them is undefined.
        num_tokens: the number of queries that see any key.
        most_pages: pages of the longest request.
    """

    decode: Part | None
    prefill: Part | None
    kv_indptr: Ints
    rows: Ints | None
    seen: npt.NDArray[np.int64] | None
    num_tokens: int
    most_pages: int

    @classmethod
    def of(cls, starts: Ints, query_lens: Ints, seq_lens: Ints, page_size: int, causal: bool) -> HostStep:
        """Split a batch and count its pages.

        Args:
            starts: int32 `[R + 1]`, query start locations.
            query_lens: int32 `[R]`.
            seq_lens: int32 `[R]`, tokens or, if not causal, keys.
            page_size: tokens of a page.
            causal: whether the queries are the last tokens of their request.
        """
        rows = seen = None
        if query_lens.size:
            # Two reductions recognise plain decodes, the most frequent step: as many queries as requests, one each.
            longer = causal and starts[-1] != len(query_lens)
            least = np.minimum.reduce  # faster than the method of the array
            if least(query_lens) < 1 or ((seq_lens < query_lens).any() if longer else least(seq_lens) < 1):
                rows, seen, starts, query_lens, seq_lens = trimmed(starts, query_lens, seq_lens, causal)
        count = len(seq_lens)
        pages = (seq_lens + (page_size - 1)) // page_size
        kv_indptr = np.empty(count + 1, dtype=np.int32)
        kv_indptr[0] = 0
        np.add.accumulate(pages, out=kv_indptr[1:])
        last = seq_lens - (pages - 1) * page_size
        tokens, decode, prefill = int(starts[-1]), None, None
        longest = int(np.maximum.reduce(seq_lens)) if count else 0
        if tokens > count:
            arrays = starts, query_lens, kv_indptr, last, seq_lens
            decodes = int((query_lens > 1).argmax())
            decode, prefill = _part(*arrays, 0, decodes), _part(*arrays, decodes, count)
        elif count:
            # The engine may change its arrays while this step can still be planned again.
            own = starts.copy(), kv_indptr, last, seq_lens.copy()
            decode = Part(0, count, 1, longest, 0, *own, kv_indptr.tobytes())
        return cls(decode, prefill, kv_indptr, rows, seen, tokens, -(-longest // page_size))

    @property
    def num_pages(self) -> int:
        """Pages of all requests."""
        return int(self.kv_indptr[-1])


def _part(
    starts: Ints, query_lens: Ints, kv_indptr: Ints, last: Ints, seq_lens: Ints, begin: int, end: int
) -> Part | None:
    if begin == end:
        return None
    first_token, first_page = int(starts[begin]), int(kv_indptr[begin])
    qo = starts[begin : end + 1] - np.int32(first_token)
    kv = kv_indptr[begin : end + 1] - np.int32(first_page)
    max_query_len = int(query_lens[begin:end].max())
    return Part(
        first_token,
        int(qo[-1]),
        max_query_len,
        int(seq_lens[begin:end].max()),
        first_page,
        qo,
        kv,
        last[begin:end],
        seq_lens[begin:end].copy(),
        kv.tobytes() if max_query_len == 1 else kv.tobytes() + qo.tobytes(),
    )


def trimmed(
    starts: Ints, query_lens: Ints, seq_lens: Ints, causal: bool
) -> tuple[Ints, npt.NDArray[np.int64] | None, Ints, Ints, Ints]:
    """Rows, seen queries, and the arrays without queries that see nothing or requests without queries."""
    blind = np.maximum(query_lens - seq_lens, 0) if causal else np.where(seq_lens > 0, 0, query_lens)
    kept_lens = query_lens - blind
    rows = np.flatnonzero(kept_lens).astype(np.int32)
    kept = kept_lens[rows].astype(np.int32, copy=False)
    packed = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(kept, out=packed[1:])
    seen = None
    if blind.any():
        first = (starts[:-1] + blind)[rows].astype(np.int64)
        seen = np.repeat(first - packed[:-1], kept) + np.arange(packed[-1])
    return rows, seen, packed, kept, seq_lens[rows].astype(np.int32, copy=False)


@dataclasses.dataclass(slots=True, eq=False)
class StepPages:
    """A step over one block table.

    Args:
        host: the step's arrays.
        seq_lens: int32 `[rows]` on the device.
        block_table: int32 `[rows, max_blocks]` on the device.
        table_of: makes this step's table from another KV group's; None if they are the same.
        seen: `host.seen` on the device.
    """

    host: HostStep
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    table_of: Callable[[torch.Tensor], torch.Tensor] | None
    seen: torch.Tensor | None

    def check(self) -> None:
        """BatchError if a request has more pages than the table has columns."""
        most, width = self.host.most_pages, self.block_table.shape[1]
        if most > width:
            raise BatchError(
                "block_table", tuple(self.block_table.shape), f"has no room for a request of {most} pages"
            )


class PageIndices:
    """A buffer of page indices, int32, for one step at a time.

    Args:
        device: where the buffer is.
        page_size: tokens of a page.
        room: its size at first; it grows when needed, unless `fixed`.
        fixed: whether captured graphs read it, so that its address must stay.
    """

    def __init__(self, device: torch.device, page_size: int, room: int, fixed: bool = False) -> None:
        self._device = device
        self._page_size = page_size
        self._fixed = fixed
        self.buffer = self._made(max(room, 1))
        """int32 `[room]`."""
        self._held: StepPages | None = None

    def hold(self, pages: StepPages) -> torch.Tensor:
        """The buffer with the indices of `pages`; they are gathered unless they are there.

        Raises:
            BatchError: more pages than a fixed buffer has room for.
        """
        if self._held is not pages:
            self._gather(pages)
            self._held = pages
        return self.buffer

    def _gather(self, pages: StepPages) -> None:
        host = pages.host
        count = host.num_pages
        if count > self.buffer.shape[0]:
            if self._fixed:
                limit = f"are more than the {self.buffer.shape[0]} that graphs were captured for"
                raise BatchError("pages", count, limit, "capture with a longer max_model_len")
            # A power of two, so that growing contexts do not allocate in every step.
            room = 1 << (count - 1).bit_length()
            self.buffer = self._made(room)
        rows = None if host.rows is None else to_device(host.rows, self._device)
        gather_page_indices(pages.block_table, pages.seq_lens, self._page_size, rows, self.buffer, count)

    def _made(self, room: int) -> torch.Tensor:
        # A tensor made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            return torch.zeros(room, dtype=torch.int32, device=self._device)
