"""The pages of a step's requests in a row, in memory that stays: gathered once per step and KV group."""

from __future__ import annotations

import numpy as np
import torch

from attnplug.backends.flashinfer.planner import KEPT_VIEWS
from attnplug.backends.flashinfer.step import Ints, StepPages
from attnplug.core.errors import BatchError
from attnplug.ops.buffers import CpuGpuBuffer, StagingRing
from attnplug.ops.page_indices import gather_page_indices

__all__ = ["PageIndices"]


class PageIndices:
    """A buffer of page indices, int32, which holds those of one step at a time.

    Args:
        device: where it is.
        max_num_seqs: requests for which its staging is made; more make that grow.
        room: indices for which it is made; more make it grow, but where `fixed`.
        fixed: whether captured graphs read it, so that it must stay where it is.
    """

    def __init__(self, device: torch.device, max_num_seqs: int, room: int, fixed: bool = False) -> None:
        self._device = device
        self._fixed = fixed
        self.buffer = torch.zeros(max(room, 1), dtype=torch.int32, device=device)
        """int32 `[room]`."""
        self._held: StepPages | None = None
        self._ring = self._make_ring(max_num_seqs)

    def hold(self, pages: StepPages) -> torch.Tensor:
        """The buffer, with the indices of `pages` in it: gathered where it holds another step's.

        Raises:
            BatchError: more pages than a fixed buffer has room for.
        """
        if self._held is not pages:
            self._gather(pages)
            self._held = pages
        return self.buffer

    def _gather(self, pages: StepPages) -> None:
        host = pages.host
        count, reqs = host.num_pages, len(host.kv_indptr) - 1
        if count > self.buffer.shape[0]:
            if self._fixed:
                limit = f"are more than the {self.buffer.shape[0]} that graphs were captured for"
                raise BatchError("pages", count, limit, "capture with a longer max_model_len")
            # Doubled, so that contexts which grow do not allocate in every step.
            room = 1 << (count - 1).bit_length()
            self.buffer = torch.zeros(room, dtype=torch.int32, device=self._device)
        if not count:
            return
        if self._device.type == "cpu":
            rows = np.arange(reqs) if host.rows is None else host.rows
            counts = np.diff(host.kv_indptr)
            columns = np.arange(count) - np.repeat(host.kv_indptr[:-1], counts)
            self.buffer.numpy()[:count] = pages.block_table.numpy()[np.repeat(rows, counts), columns]
            return
        staging: _Staging = self._ring.acquire()
        if staging.room < reqs:
            self._ring = self._make_ring(2 * reqs)
            staging = self._ring.acquire()
        indptr, rows_sent = staging.send(host.kv_indptr, host.rows)
        self._ring.release()
        gather_page_indices(pages.block_table, indptr, rows_sent, self.buffer, count)

    def _make_ring(self, reqs: int) -> StagingRing:
        return StagingRing([_Staging(reqs, self._device) for _ in range(2)], self._device)


class _Staging:
    """On its way to the device: where each request's pages start, and its row of the block table.

    Args:
        room: requests that it can take.
        device: where they go.
    """

    def __init__(self, room: int, device: torch.device) -> None:
        self.room = room
        self._buffer = CpuGpuBuffer(2 * room + 1, dtype=torch.int32, device=device)
        self._views: dict[tuple[int, bool], tuple[torch.Tensor, ...]] = {}

    def send(self, indptr: Ints, rows: Ints | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Both on the device, where they stay until the next are sent; the second is None where `rows` is."""
        ends = len(indptr)
        needed = ends if rows is None else ends + len(rows)
        array = self._buffer.np
        array[:ends] = indptr
        if rows is not None:
            array[ends:needed] = rows
        views = self._views.get((ends, rows is None))
        if views is None:
            # Slicing tensors takes longer than filling them, and batch sizes come again.
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            host, there = self._buffer.cpu[:needed], self._buffer.gpu[:needed]
            views = self._views[ends, rows is None] = host, there, there[:ends], there[ends:]
        host, there, starts, rows_there = views
        if self._buffer.gpu is not self._buffer.cpu:
            there.copy_(host, non_blocking=True)
        return starts, None if rows is None else rows_there
