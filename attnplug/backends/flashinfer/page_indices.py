"""The pages of a step's requests in a row, in memory that stays: gathered once per step and KV group."""

from __future__ import annotations

import numpy as np
import torch

from attnplug.backends.flashinfer.step import StepPages
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
        needed = 2 * reqs + 1
        staged: CpuGpuBuffer = self._ring.acquire()
        if staged.np.shape[0] < needed:
            self._ring = self._make_ring(2 * reqs)
            staged = self._ring.acquire()
        staged.np[: reqs + 1] = host.kv_indptr
        if host.rows is not None:
            staged.np[reqs + 1 : needed] = host.rows
        sent = staged.copy_to_gpu(needed)
        self._ring.release()
        rows_sent = None if host.rows is None else sent[reqs + 1 :]
        gather_page_indices(pages.block_table, sent[: reqs + 1], rows_sent, self.buffer, count)

    def _make_ring(self, reqs: int) -> StagingRing:
        size = 2 * reqs + 1
        slots = [CpuGpuBuffer(size, dtype=torch.int32, device=self._device) for _ in range(2)]
        return StagingRing(slots, self._device)
